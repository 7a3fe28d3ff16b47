//! Attention over all context ranks' keys: they go round a ring, and what each rank's queries see of them is
//! merged; backward, their gradients go round with them and come home.

use drivetrain_core::{Result, communicator::Work};
use drivetrain_kernels::{
    Rows, RowsMut,
    ops::attention::{self, AttentionDims, Gradients, Inputs, Saved, Span},
};

use crate::{modules::Context, workspace::Buffer};

/// H, K, E and the window of an attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CoreShape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) window: Option<usize>,
}

impl CoreShape {
    fn dims<'a>(&self, spans: &'a [Span]) -> AttentionDims<'a> {
        AttentionDims {
            spans,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: (1.0 / (self.head_dim as f64).sqrt()) as f32,
            window: self.window,
        }
    }

    /// Width of k, and of v.
    fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Fills out [T, H E] and lse [T, H] from this rank's q, k and v.
///
/// # Errors
/// The communicator's.
pub(crate) fn forward(
    cx: &Context<'_>,
    shape: CoreShape,
    inputs: &Inputs<'_>,
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    let context = &cx.ranks.context;
    let width = shape.heads * shape.head_dim;
    let attend = |inputs: &Inputs<'_>, peer, merge, (out, lse): (&mut [f32], &mut [f32])| {
        let spans = cx.packed.spans(context.shape.index, peer);
        let dims = shape.dims(&spans);
        let mut scratch = cx.workspace.take(dims.forward_scratch_len(cx.cpu));
        let out = RowsMut::contiguous(out, width);
        attention::forward(cx.cpu, &dims, inputs, merge, out, lse, &mut scratch);
    };
    if context.is_alone() {
        attend(inputs, context.shape.index, false, (out, lse));
        return Ok(());
    }
    // A query meets two pieces of the sequence on each rank, its own among them.
    out.fill(0.0);
    lse.fill(f32::NEG_INFINITY);
    let mut kv = pack(cx, shape, inputs).share();
    for peer in context.ring() {
        let next = context.before(peer);
        let mut arriving = cx
            .workspace
            .take(cx.packed.tokens_of(next) * 2 * shape.kv());
        let passing = match context.is_last(peer) {
            true => Work::done(),
            false => context.pass(&kv, &mut arriving)?,
        };
        attend(&unpack(shape, inputs.q, &kv), peer, true, (out, lse));
        passing.wait()?;
        kv = arriving.share();
    }
    Ok(())
}

/// Fills the gradients of this rank's q, k and v.
///
/// # Errors
/// The communicator's.
pub(crate) fn backward(
    cx: &Context<'_>,
    shape: CoreShape,
    inputs: &Inputs<'_>,
    saved: &Saved<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let context = &cx.ranks.context;
    let attend = |inputs: &Inputs<'_>, peer, accumulate, gradients: Gradients<'_>| {
        let spans = cx.packed.spans(context.shape.index, peer);
        let dims = shape.dims(&spans);
        let mut scratch = cx.workspace.take(dims.backward_scratch_len(cx.cpu));
        attention::backward(
            cx.cpu,
            &dims,
            inputs,
            saved,
            accumulate,
            gradients,
            &mut scratch,
        );
    };
    if context.is_alone() {
        attend(inputs, context.shape.index, false, gradients);
        return Ok(());
    }
    let Gradients {
        mut dq,
        mut dk,
        mut dv,
    } = gradients;
    (0..dq.rows()).for_each(|row| dq.row(row).fill(0.0));
    let mut kv = pack(cx, shape, inputs).share();
    let mut dkv = cx.workspace.zeros(kv.len());
    for peer in context.ring() {
        let next = context.before(peer);
        let len = cx.packed.tokens_of(next) * 2 * shape.kv();
        let mut arriving = cx.workspace.take(len);
        let passing = match context.is_last(peer) {
            true => Work::done(),
            false => context.pass(&kv, &mut arriving)?,
        };
        let [dk, dv] = halves(shape, &mut dkv);
        let gradients = Gradients {
            dq: dq.reborrow(),
            dk,
            dv,
        };
        attend(&unpack(shape, inputs.q, &kv), peer, true, gradients);
        passing.wait()?;
        // The gradient moves on with its keys, and from the last rank of the ring back to their own.
        let mut carried = cx.workspace.take(len);
        context.pass(&dkv.share(), &mut carried)?.wait()?;
        (kv, dkv) = (arriving.share(), carried);
    }
    let all = Rows::contiguous(&dkv, 2 * shape.kv());
    copy(&mut dk, all.columns(0..shape.kv()));
    copy(&mut dv, all.columns(shape.kv()..2 * shape.kv()));
    Ok(())
}

/// k and v side by side, [T, 2 K E].
fn pack(cx: &Context<'_>, shape: CoreShape, inputs: &Inputs<'_>) -> Buffer {
    let mut kv = cx.workspace.take(inputs.k.rows() * 2 * shape.kv());
    let [mut k, mut v] = halves(shape, &mut kv);
    copy(&mut k, inputs.k);
    copy(&mut v, inputs.v);
    kv
}

fn unpack<'a>(shape: CoreShape, q: Rows<'a>, kv: &'a [f32]) -> Inputs<'a> {
    let all = Rows::contiguous(kv, 2 * shape.kv());
    Inputs {
        q,
        k: all.columns(0..shape.kv()),
        v: all.columns(shape.kv()..2 * shape.kv()),
    }
}

fn halves(shape: CoreShape, kv: &mut [f32]) -> [RowsMut<'_>; 2] {
    RowsMut::contiguous(kv, 2 * shape.kv()).split_columns([shape.kv(), shape.kv()])
}

fn copy(target: &mut RowsMut<'_>, source: Rows<'_>) {
    for row in 0..source.rows() {
        target.row(row).copy_from_slice(source.row(row));
    }
}
