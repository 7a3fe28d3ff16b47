//! Cuts spans into tiles and starts the kernels of `cuda.cu`.

mod cuda_tiles;

use crate::cuda::source::ATTENTION as MODULE;
use crate::cuda::{Arg, CudaError, Device, Rows, RowsMut, View, ViewMut, count};
use crate::ops::attention::AttentionDims;
use cuda_tiles::{Tile, Wave, key_tiles, query_tiles, upload, waves};

/// E at most.
pub const MOST_HEAD_DIM: usize = 256;

const THREADS: u32 = 128;
/// As `NO_WINDOW` counts: more keys than there are positions.
const NO_WINDOW: u32 = u32::MAX;

/// A form of the kernels: the widest head dim it is for, rows of a tile, columns of the tiles it meets.
#[derive(Debug)]
struct Form {
    width: usize,
    query_rows: usize,
    key_rows: usize,
    columns: usize,
    kernels: [&'static str; 3],
}

macro_rules! form {
    ($width:literal, $query_rows:literal, $key_rows:literal, $columns:literal) => {
        Form {
            width: $width,
            query_rows: $query_rows,
            key_rows: $key_rows,
            columns: $columns,
            kernels: [
                concat!("attention_forward_", $width),
                concat!("attention_backward_queries_", $width),
                concat!("attention_backward_keys_", $width),
            ],
        }
    };
}

static FORMS: [Form; 3] = [
    form!(64, 32, 32, 64),
    form!(128, 32, 32, 64),
    form!(256, 32, 16, 32),
];

impl Form {
    /// Bytes of shared memory for tiles of the two sides and for `strips` strips of scores or the like.
    fn shared_bytes(&self, head_dim: usize, tiles: usize, rows: usize, strips: usize) -> u32 {
        let leading = head_dim.next_multiple_of(4) + 4;
        count(
            "shared memory",
            4 * (tiles * leading + strips * rows * self.columns),
        )
    }
}

/// The tiles of a micro-batch's spans, made once and used by every layer.
#[derive(Debug)]
pub struct Plan {
    /// H, K and E, then window and scale, as kernels take them.
    numbers: [Arg; 3],
    factors: [Arg; 2],
    num_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    queries: usize,
    keys: usize,
    form: &'static Form,
    /// In one wave no row is in two tiles; waves follow each other in the order of the spans.
    of_queries: Vec<Wave>,
    of_keys: Vec<Wave>,
    /// Some query sees nothing, or some key is not seen: overwritten results need filling in.
    idle_queries: bool,
    idle_keys: bool,
}

impl Plan {
    /// Of these spans over `queries` rows of q and `keys` rows of k and v.
    ///
    /// # Panics
    /// If dimensions are 0 or do not divide, E is above 256, or a span ends beyond its rows.
    #[track_caller]
    pub fn new(
        device: &Device,
        dims: &AttentionDims<'_>,
        queries: usize,
        keys: usize,
    ) -> Result<Self, CudaError> {
        assert!(
            dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads),
            "attention: {} query heads over {} key/value heads",
            dims.heads,
            dims.kv_heads
        );
        assert!(
            dims.window != Some(0),
            "attention: a window of 0 keys leaves nothing to see"
        );
        let form = FORMS
            .iter()
            .position(|form| (1..=form.width).contains(&dims.head_dim));
        let form = form.unwrap_or_else(|| {
            panic!(
                "attention: head dim {} is not in 1 to 256, as the CUDA kernels need",
                dims.head_dim
            )
        });
        for span in dims.spans {
            let (q, k) = (&span.queries, &span.keys);
            assert!(
                q.start <= q.end && q.end <= queries && k.start <= k.end && k.end <= keys,
                "attention: {span:?} beyond {queries} queries and {keys} keys"
            );
        }
        let window = dims
            .window
            .and_then(|window| u32::try_from(window).ok())
            .unwrap_or(NO_WINDOW);
        let by_query = waves(
            dims.spans,
            |span| span.queries.clone(),
            |span| query_tiles(span, window, FORMS[form].query_rows),
        );
        let by_key = waves(
            dims.spans,
            |span| span.keys.clone(),
            |span| key_tiles(span, window, FORMS[form].key_rows),
        );
        let covered = |waves: &[Vec<Tile>]| -> usize {
            waves.iter().flatten().map(|tile| tile.rows as usize).sum()
        };
        let numbers = [dims.heads, dims.kv_heads, dims.head_dim];
        Ok(Self {
            numbers: numbers.map(|n| count("heads or E", n).into()),
            factors: [window.into(), dims.scale.into()],
            num_heads: dims.heads,
            kv_heads: dims.kv_heads,
            head_dim: dims.head_dim,
            queries,
            keys,
            form: &FORMS[form],
            idle_queries: covered(&by_query) < queries,
            idle_keys: covered(&by_key) < keys,
            of_queries: upload(device, by_query)?,
            of_keys: upload(device, by_key)?,
        })
    }

    /// Elements of the scratch of [`backward`].
    pub fn backward_scratch_len(&self) -> usize {
        self.queries * self.num_heads
    }
}

/// Queries, keys and values, after the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[Tq, H E]`.
    pub q: Rows<'a>,
    /// `[Tk, K E]`.
    pub k: Rows<'a>,
    /// `[Tk, K E]`.
    pub v: Rows<'a>,
}

/// What the forward pass left, and the gradient that arrives.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// `[Tq, H E]`.
    pub out: Rows<'a>,
    /// `[Tq, H]`.
    pub lse: View<'a, f32>,
    /// `[Tq, H E]`.
    pub dout: Rows<'a>,
}

/// Where the gradients go. Bands of one buffer by [`RowsMut::split_columns`].
#[derive(Debug)]
pub struct Gradients<'a> {
    /// `[Tq, H E]`.
    pub dq: RowsMut<'a>,
    /// `[Tk, K E]`.
    pub dk: RowsMut<'a>,
    /// `[Tk, K E]`.
    pub dv: RowsMut<'a>,
}

/// Attends to the keys of all spans, from nothing or, with `merge`, from what earlier calls left.
///
/// # Panics
/// Without `merge`, if two spans have a query in common.
#[track_caller]
pub fn forward(
    device: &Device,
    plan: &Plan,
    inputs: &Inputs<'_>,
    merge: bool,
    out: RowsMut<'_>,      // [Tq, H E]
    lse: ViewMut<'_, f32>, // [Tq, H]
) -> Result<(), CudaError> {
    plan.check_inputs(inputs);
    plan.check("out", out.shape(), (plan.queries, plan.num_heads));
    lse.check("lse", plan.queries * plan.num_heads);
    assert!(
        merge || plan.of_queries.len() <= 1,
        "attention: queries of two spans overlap: merge them"
    );
    if !merge && plan.idle_queries {
        plan.fill(device, &out, 0.0)?;
        let width = Arg::from(plan.num_heads);
        plan.fill_rows(
            device,
            [lse.arg(), width],
            plan.num_heads,
            plan.queries,
            f32::NEG_INFINITY,
        )?;
    }
    let form = plan.form;
    let tiles = form.query_rows + 2 * form.columns;
    let shared = form.shared_bytes(plan.head_dim, tiles, form.query_rows, 1);
    let results = [&[Arg::from(merge)], &out.args()[..], &[lse.arg()]].concat();
    for wave in &plan.of_queries {
        let args = [
            &[wave.tiles.view().arg()],
            &plan.inputs(inputs)[..],
            &results,
        ]
        .concat();
        let grid = [wave.count, count("H", plan.num_heads), 1];
        // SAFETY: shapes as checked above; tiles lie inside the spans, these inside the rows.
        unsafe { plan.launch(device, form.kernels[0], grid, shared, args)? };
    }
    Ok(())
}

/// Overwrites dq, dk and dv, or adds to them with `accumulate`: what flows through the pairs of these spans.
///
/// `saved` is of all keys, also those of spans that are not in the plan. scratch: [`Plan::backward_scratch_len`].
///
/// # Panics
/// Without `accumulate`, if two spans have a query or a key in common.
#[track_caller]
pub fn backward(
    device: &Device,
    plan: &Plan,
    inputs: &Inputs<'_>,
    saved: &Saved<'_>,
    accumulate: bool,
    gradients: Gradients<'_>,
    scratch: ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    plan.check_inputs(inputs);
    let Gradients { dq, dk, dv } = &gradients;
    let (of_queries, of_keys) = ((plan.queries, plan.num_heads), (plan.keys, plan.kv_heads));
    plan.check("out", saved.out.shape(), of_queries);
    plan.check("dout", saved.dout.shape(), of_queries);
    plan.check("dq", dq.shape(), of_queries);
    plan.check("dk", dk.shape(), of_keys);
    plan.check("dv", dv.shape(), of_keys);
    saved.lse.check("lse", plan.queries * plan.num_heads);
    scratch.check("scratch", plan.backward_scratch_len());
    if !accumulate {
        let apart = plan.of_queries.len() <= 1 && plan.of_keys.len() <= 1;
        assert!(
            apart,
            "attention: queries or keys of two spans overlap: accumulate them"
        );
        if plan.idle_queries {
            plan.fill(device, dq, 0.0)?;
        }
        if plan.idle_keys {
            plan.fill(device, dk, 0.0)?;
            plan.fill(device, dv, 0.0)?;
        }
    }
    let deltas = plan.backward_scratch_len();
    let rows = [saved.out.args(), saved.dout.args()].concat();
    let args = [
        &rows[..],
        &[scratch.arg()],
        &[plan.numbers[0], plan.numbers[2], Arg::from(deltas)],
    ]
    .concat();
    let grid = [count("Tq H", deltas).div_ceil(THREADS / 32), 1, 1];
    // SAFETY: shapes as checked above.
    unsafe { device.launch(&MODULE, "attention_delta", grid, [THREADS, 1, 1], &args)? };

    let form = plan.form;
    let known = [
        &plan.inputs(inputs)[..],
        &[saved.lse.arg(), scratch.arg()],
        &saved.dout.args(),
    ]
    .concat();
    let known = [&known[..], &[Arg::from(accumulate)]].concat();
    for wave in &plan.of_queries {
        let tiles = 2 * form.query_rows + 2 * form.columns;
        let shared = form.shared_bytes(plan.head_dim, tiles, form.query_rows, 1);
        let args = [&[wave.tiles.view().arg()], &known[..], &dq.args()].concat();
        let grid = [wave.count, count("H", plan.num_heads), 1];
        // SAFETY: as in `forward`.
        unsafe { plan.launch(device, form.kernels[1], grid, shared, args)? };
    }
    for wave in &plan.of_keys {
        let tiles = 2 * form.key_rows + 2 * form.columns;
        let shared = form.shared_bytes(plan.head_dim, tiles, form.key_rows, 2);
        let args = [
            &[wave.tiles.view().arg()],
            &known[..],
            &dk.args(),
            &dv.args(),
        ]
        .concat();
        let grid = [wave.count, count("K", plan.kv_heads), 1];
        // SAFETY: as in `forward`.
        unsafe { plan.launch(device, form.kernels[2], grid, shared, args)? };
    }
    Ok(())
}

impl Plan {
    /// # Safety
    /// As [`Device::launch`]; the kernel's last parameters are added here.
    unsafe fn launch(
        &self,
        device: &Device,
        kernel: &'static str,
        grid: [u32; 3],
        shared_bytes: u32,
        args: Vec<Arg>,
    ) -> Result<(), CudaError> {
        let args = [&args[..], &self.numbers, &self.factors].concat();
        // SAFETY: the caller's.
        unsafe {
            device.launch_with(
                &MODULE,
                kernel,
                (grid, [THREADS, 1, 1], shared_bytes),
                &args,
            )
        }
    }

    /// q, k and v, each with its stride.
    fn inputs(&self, inputs: &Inputs<'_>) -> Vec<Arg> {
        [inputs.q.args(), inputs.k.args(), inputs.v.args()].concat()
    }

    fn fill(&self, device: &Device, x: &RowsMut<'_>, value: f32) -> Result<(), CudaError> {
        let (rows, width) = x.shape();
        self.fill_rows(device, x.args(), width, rows, value)
    }

    fn fill_rows(
        &self,
        device: &Device,
        [address, stride]: [Arg; 2],
        width: usize,
        rows: usize,
        value: f32,
    ) -> Result<(), CudaError> {
        let args = [address, stride, count("width", width).into(), value.into()];
        let grid = [count("rows", rows), 1, 1];
        // SAFETY: rows of this width lie there.
        unsafe { device.launch(&MODULE, "attention_fill", grid, [THREADS, 1, 1], &args) }
    }

    #[track_caller]
    fn check_inputs(&self, inputs: &Inputs<'_>) {
        self.check("q", inputs.q.shape(), (self.queries, self.num_heads));
        self.check("k", inputs.k.shape(), (self.keys, self.kv_heads));
        self.check("v", inputs.v.shape(), (self.keys, self.kv_heads));
    }

    #[track_caller]
    fn check(&self, name: &str, found: (usize, usize), (rows, heads): (usize, usize)) {
        let expected = (rows, heads * self.head_dim);
        assert!(
            found == expected,
            "attention: {name} is {found:?}, the plan says {expected:?}"
        );
    }
}
