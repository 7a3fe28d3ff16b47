use super::{AttentionDims, Gradients, Inputs, Saved, Span, backward, forward, reference};
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};
use crate::{Cpu, Rows, RowsMut};

const BASE: AttentionDims<'static> = AttentionDims {
    spans: &[],
    heads: 4,
    kv_heads: 2,
    head_dim: 3,
    scale: 0.6,
    window: None,
};

#[test]
fn reference_backward_is_the_derivative() {
    let packed = Span::packed(&[0, 3, 3, 8]);
    // Two spans with the same queries, one over keys that only some of them see, and a key that none sees.
    let mut apart = vec![Span::causal(2..8), Span::causal(0..1)];
    apart[0].keys = 0..3;
    apart[0].offset = 1;
    apart.push(Span {
        queries: 4..7,
        keys: 3..7,
        offset: -1,
    });
    for (spans, window) in [
        (&packed, None),
        (&packed, Some(1)),
        (&packed, Some(3)),
        (&apart, None),
        (&apart, Some(3)),
    ] {
        let dims = AttentionDims {
            spans,
            window,
            ..BASE
        };
        let (q, k, v) = (
            wide(&random(1, 96)),
            wide(&random(2, 48)),
            wide(&random(3, 48)),
        );
        let dout = wide(&random(4, 96));
        let (dq, dk, dv) = reference::backward(&dims, &q, &k, &v, &dout);
        assert_gradient("dq", &q, &dq, |q| {
            dot(&reference::forward(&dims, q, &k, &v).0, &dout)
        });
        assert_gradient("dk", &k, &dk, |k| {
            dot(&reference::forward(&dims, &q, k, &v).0, &dout)
        });
        assert_gradient("dv", &v, &dv, |v| {
            dot(&reference::forward(&dims, &q, &k, v).0, &dout)
        });
    }
}

/// q, k and v in one fused buffer, as a projection leaves them, with a stretch of the scores.
struct Case<'a> {
    dims: AttentionDims<'a>,
    qkv: Vec<f32>,
    dout: Vec<f32>,
}

impl<'a> Case<'a> {
    fn new(dims: AttentionDims<'a>, stretch: f32) -> Self {
        let width = (dims.heads + 2 * dims.kv_heads) * dims.head_dim;
        let tokens = dims.spans.last().map_or(0, |span| span.queries.end);
        Self {
            dims,
            qkv: random(1, tokens * width)
                .iter()
                .map(|x| x * stretch)
                .collect(),
            dout: random(2, tokens * dims.heads * dims.head_dim),
        }
    }

    fn widths(&self) -> [usize; 3] {
        let kv = self.dims.kv_heads * self.dims.head_dim;
        [self.dims.heads * self.dims.head_dim, kv, kv]
    }

    fn inputs(&self) -> Inputs<'_> {
        let [q, k, v] = self.widths();
        let rows = Rows::contiguous(&self.qkv, q + k + v);
        Inputs {
            q: rows.columns(0..q),
            k: rows.columns(q..q + k),
            v: rows.columns(q + k..q + k + v),
        }
    }

    fn check(&self, cpu: Cpu, tolerance: f64) {
        let dims = &self.dims;
        let what = format!("{dims:?} {cpu:?}");
        let [width, kv_width, _] = self.widths();
        let inputs = self.inputs();
        let flat = |rows: Rows<'_>| -> Vec<f64> {
            (0..rows.rows()).flat_map(|t| wide(rows.row(t))).collect()
        };
        let (q, k, v) = (flat(inputs.q), flat(inputs.k), flat(inputs.v));
        let (out_ref, lse_ref) = reference::forward(dims, &q, &k, &v);

        let mut scratch = vec![f32::NAN; dims.forward_scratch_len(cpu)];
        let mut out = vec![f32::NAN; q.len()];
        let mut lse = vec![f32::NAN; inputs.q.rows() * dims.heads];
        let rows = RowsMut::contiguous(&mut out, width);
        forward(cpu, dims, &inputs, false, rows, &mut lse, &mut scratch);
        assert_close(&format!("out {what}"), &out, &out_ref, tolerance);
        assert_close(&format!("lse {what}"), &lse, &lse_ref, tolerance);

        let mut scratch = vec![f32::NAN; dims.backward_scratch_len(cpu)];
        let mut dqkv = vec![f32::NAN; self.qkv.len()];
        let [dq, dk, dv] =
            RowsMut::contiguous(&mut dqkv, width + 2 * kv_width).split_columns(self.widths());
        let saved = Saved {
            out: Rows::contiguous(&out, width),
            lse: &lse,
            dout: Rows::contiguous(&self.dout, width),
        };
        backward(
            cpu,
            dims,
            &inputs,
            &saved,
            false,
            Gradients { dq, dk, dv },
            &mut scratch,
        );
        let (dq, dk, dv) = reference::backward(dims, &q, &k, &v, &wide(&self.dout));
        let rows = Rows::contiguous(&dqkv, width + 2 * kv_width);
        let mut start = 0;
        for (name, expected, width) in [
            ("dq", dq, width),
            ("dk", dk, kv_width),
            ("dv", dv, kv_width),
        ] {
            let band: Vec<f32> = (0..rows.rows())
                .flat_map(|t| rows.columns(start..start + width).row(t).to_vec())
                .collect();
            assert_close(&format!("{name} {what}"), &band, &expected, tolerance);
            start += width;
        }
    }
}

#[test]
fn awkward_lengths_heads_and_windows_agree_with_the_reference() {
    let case = |cu_seqlens: &'static [usize], heads, kv_heads, head_dim, window| {
        let dims = AttentionDims {
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window,
            ..BASE
        };
        (Span::packed(cu_seqlens), dims)
    };
    let cases: [(Vec<Span>, AttentionDims<'_>); _] = [
        case(&[0, 3, 3, 8], 4, 2, 3, None),
        case(&[0, 1], 1, 1, 1, None),
        case(&[0, 64, 129], 2, 1, 16, None),
        case(&[0, 300], 3, 1, 64, None),
        case(&[0, 40, 41, 210], 2, 2, 80, Some(7)),
        case(&[0, 300], 2, 1, 20, Some(130)),
        case(&[0, 200], 1, 1, 48, Some(1)),
        case(&[0, 150, 150], 2, 2, 128, Some(1000)),
        case(&[0, 0], 2, 1, 8, None),
    ];
    for cpu in all_cpus() {
        for (spans, dims) in &cases {
            Case::new(AttentionDims { spans, ..*dims }, 1.0).check(cpu, 2e-6);
        }
    }
}

#[test]
fn large_scores_stay_stable() {
    let dims = AttentionDims {
        spans: &Span::packed(&[0, 200]),
        head_dim: 16,
        scale: 1.0,
        ..BASE
    };
    for cpu in all_cpus() {
        // Scores reach hundreds, so their own f32 rounding is some 1e-5.
        Case::new(dims, 8.0).check(cpu, 1e-4);
    }
}

#[test]
fn a_sequence_does_not_see_its_neighbour() {
    let cpu = Cpu::new(1);
    let run = |cu_seqlens: &[usize], from: usize| {
        let spans = Span::packed(&[0, 90]);
        let whole = AttentionDims {
            spans: &spans,
            ..BASE
        };
        let whole = Case::new(whole, 1.0);
        let width = whole.widths().iter().sum::<usize>();
        let spans = Span::packed(cu_seqlens);
        let dims = AttentionDims {
            spans: &spans,
            ..BASE
        };
        let case = Case {
            dims,
            qkv: whole.qkv[from * width..].to_vec(),
            dout: Vec::new(),
        };
        let tokens = 90 - from;
        let mut out = vec![f32::NAN; tokens * 12];
        let mut lse = vec![f32::NAN; tokens * 4];
        let mut scratch = vec![f32::NAN; dims.forward_scratch_len(cpu)];
        let rows = RowsMut::contiguous(&mut out, 12);
        let inputs = case.inputs();
        forward(cpu, &dims, &inputs, false, rows, &mut lse, &mut scratch);
        out
    };
    assert_eq!(run(&[0, 33, 90], 0)[33 * 12..], run(&[0, 57], 33));
}

#[test]
fn rows_without_anything_to_see_are_zero() {
    let (heads, e) = (BASE.heads, BASE.head_dim);
    // Queries 0, 1 and keys 0, 1 are in no span; 2 and 3 lie before every key; keys 7, 8 after every query.
    let spans = [Span {
        queries: 2..8,
        keys: 2..9,
        offset: -2,
    }];
    let dims = AttentionDims {
        spans: &spans,
        ..BASE
    };
    let packed = Span::packed(&[0, 9]);
    let whole = AttentionDims {
        spans: &packed,
        ..BASE
    };
    let case = Case::new(whole, 1.0);
    let inputs = case.inputs();
    for cpu in all_cpus() {
        let (mut out, mut lse) = (vec![f32::NAN; 9 * 12], vec![f32::NAN; 9 * 4]);
        let mut scratch = vec![f32::NAN; dims.backward_scratch_len(cpu)];
        let rows = RowsMut::contiguous(&mut out, 12);
        forward(cpu, &dims, &inputs, false, rows, &mut lse, &mut scratch);
        let mut grads = [
            vec![f32::NAN; 9 * 12],
            vec![f32::NAN; 9 * 6],
            vec![f32::NAN; 9 * 6],
        ];
        let [dq, dk, dv] = &mut grads;
        let gradients = Gradients {
            dq: RowsMut::contiguous(dq, 12),
            dk: RowsMut::contiguous(dk, 6),
            dv: RowsMut::contiguous(dv, 6),
        };
        let saved = Saved {
            out: Rows::contiguous(&out, 12),
            lse: &lse,
            dout: Rows::contiguous(&case.dout, 12),
        };
        backward(cpu, &dims, &inputs, &saved, false, gradients, &mut scratch);
        for t in 0..9 {
            let idle = |x: &[f32]| x.iter().all(|&x| x == 0.0);
            let (query, key) = ((4..8).contains(&t), (2..6).contains(&t));
            let row = |x: &[f32]| x[t * heads * e..][..heads * e].to_vec();
            assert_eq!(idle(&row(&out)), !query, "out[{t}]");
            assert_eq!(lse[t * heads] == f32::NEG_INFINITY, !query, "lse[{t}]");
            assert_eq!(idle(&row(&grads[0])), !query, "dq[{t}]");
            assert_eq!(idle(&grads[1][t * 6..][..6]), !key, "dk[{t}]");
            assert_eq!(idle(&grads[2][t * 6..][..6]), !key, "dv[{t}]");
        }
        assert!(grads.iter().flatten().chain(&out).all(|x| x.is_finite()));
    }
}

#[test]
fn flops_count_the_pairs_that_are_seen() {
    let pairs = |cu_seqlens: &[usize], window| {
        let spans = Span::packed(cu_seqlens);
        let dims = AttentionDims {
            spans: &spans,
            window,
            ..BASE
        };
        dims.forward_flops() / (4.0 * 3.0 * 4.0)
    };
    assert_eq!(pairs(&[0, 4, 6], None), 10.0 + 3.0);
    assert_eq!(pairs(&[0, 4, 6], Some(2)), (1.0 + 2.0 + 2.0 + 2.0) + 3.0);
    assert_eq!(pairs(&[0, 4], Some(9)), 10.0);
}

#[test]
#[should_panic(expected = "cu_seqlens must not fall")]
fn falling_starts_are_refused() {
    Span::packed(&[0, 5, 3]);
}

fn forward_of_nothing(spans: &[Span], tokens: usize) {
    let dims = AttentionDims { spans, ..BASE };
    let (x, mut out) = (vec![0.0; tokens * 12], vec![0.0; tokens * 12]);
    let mut scratch = vec![0.0; dims.forward_scratch_len(Cpu::new(1))];
    let inputs = Inputs {
        q: Rows::contiguous(&x, 12),
        k: Rows::contiguous(&x[..tokens * 6], 6),
        v: Rows::contiguous(&x[..tokens * 6], 6),
    };
    let out = RowsMut::contiguous(&mut out, 12);
    let mut lse = vec![0.0; tokens * 4];
    forward(
        Cpu::new(1),
        &dims,
        &inputs,
        false,
        out,
        &mut lse,
        &mut scratch,
    );
}

#[test]
#[should_panic(expected = "beyond 3 queries and 3 keys")]
fn a_span_beyond_the_rows_is_refused() {
    forward_of_nothing(&[Span::causal(0..4)], 3);
}

#[test]
#[should_panic(expected = "queries 0..2 and 1..3 of two spans overlap")]
fn queries_of_two_spans_need_merging() {
    forward_of_nothing(&[Span::causal(1..3), Span::causal(0..2)], 3);
}
