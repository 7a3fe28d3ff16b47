use super::{AttentionDims, Gradients, Inputs, Saved, backward, forward, reference};
use crate::testing::{all_cpus, assert_close, assert_gradient, dot, random, wide};
use crate::{Cpu, Rows, RowsMut};

const BASE: AttentionDims<'static> = AttentionDims {
    cu_seqlens: &[0, 3, 3, 8],
    heads: 4,
    kv_heads: 2,
    head_dim: 3,
    scale: 0.6,
    window: None,
};

#[test]
fn reference_backward_is_the_derivative() {
    for window in [None, Some(1), Some(3)] {
        let dims = AttentionDims { window, ..BASE };
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
        let tokens = dims.tokens();
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
        let mut lse = vec![f32::NAN; dims.tokens() * dims.heads];
        let rows = RowsMut::contiguous(&mut out, width);
        forward(cpu, dims, &inputs, rows, &mut lse, &mut scratch);
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
    let case = |cu_seqlens, heads, kv_heads, head_dim, window| AttentionDims {
        cu_seqlens,
        heads,
        kv_heads,
        head_dim,
        scale: (head_dim as f32).sqrt().recip(),
        window,
    };
    let cases = [
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
        for dims in cases {
            Case::new(dims, 1.0).check(cpu, 2e-6);
        }
    }
}

#[test]
fn large_scores_stay_stable() {
    let dims = AttentionDims {
        cu_seqlens: &[0, 200],
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
        let whole = Case::new(
            AttentionDims {
                cu_seqlens: &[0, 90],
                ..BASE
            },
            1.0,
        );
        let width = whole.widths().iter().sum::<usize>();
        let dims = AttentionDims { cu_seqlens, ..BASE };
        let case = Case {
            dims,
            qkv: whole.qkv[from * width..].to_vec(),
            dout: Vec::new(),
        };
        let mut out = vec![f32::NAN; dims.tokens() * 12];
        let mut lse = vec![f32::NAN; dims.tokens() * 4];
        let mut scratch = vec![f32::NAN; dims.forward_scratch_len(cpu)];
        let rows = RowsMut::contiguous(&mut out, 12);
        forward(cpu, &dims, &case.inputs(), rows, &mut lse, &mut scratch);
        out
    };
    assert_eq!(run(&[0, 33, 90], 0)[33 * 12..], run(&[0, 57], 33));
}

#[test]
fn flops_count_the_pairs_that_are_seen() {
    let pairs = |cu_seqlens: &[usize], window| {
        let dims = AttentionDims {
            cu_seqlens,
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
#[should_panic(expected = "cu_seqlens must rise from 0")]
fn falling_starts_are_refused() {
    let dims = AttentionDims {
        cu_seqlens: &[0, 5, 3],
        ..BASE
    };
    let empty = Rows::new(&[], 0, 1, 1);
    let inputs = Inputs {
        q: empty,
        k: empty,
        v: empty,
    };
    let out = RowsMut::new(&mut [], 0, 1, 1);
    forward(Cpu::new(1), &dims, &inputs, out, &mut [], &mut []);
}
