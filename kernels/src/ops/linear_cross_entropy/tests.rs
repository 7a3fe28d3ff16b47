use super::{
    HeadGradients, HeadInputs, HeadOutputs, LinearCrossEntropyDims, backward, forward,
    forward_backward, reference,
};
use crate::Cpu;
use crate::ops::cross_entropy::Derivatives;
use crate::testing::{all_cpus, assert_close, assert_gradient, random, wide};

#[test]
fn reference_backward_is_the_derivative() {
    let dims = LinearCrossEntropyDims {
        rows: 3,
        width: 4,
        vocab: 5,
        temperature: 0.5,
    };
    let (hidden, head, targets) = (wide(&random(1, 12)), wide(&random(2, 20)), [4, 0, 2]);
    let (dl, de) = (wide(&random(3, 3)), wide(&random(4, 3)));
    let loss = |hidden: &[f64], head: &[f64]| -> f64 {
        let rows = reference::forward(&dims, hidden, head, &targets);
        rows.iter()
            .zip(dl.iter().zip(&de))
            .map(|(r, (dl, de))| r.0 * dl + r.1 * de)
            .sum()
    };
    let (dhidden, dhead) = reference::backward(&dims, &hidden, &head, &targets, &dl, &de);
    assert_gradient("dhidden", &hidden, &dhidden, |h| loss(h, &head));
    assert_gradient("dhead", &head, &dhead, |w| loss(&hidden, w));
}

struct Case {
    dims: LinearCrossEntropyDims,
    hidden: Vec<f32>,
    head: Vec<f32>,
    targets: Vec<u32>,
    d_log_prob: Vec<f32>,
    d_entropy: Vec<f32>,
}

impl Case {
    fn new(rows: usize, width: usize, vocab: usize, temperature: f32) -> Self {
        Self {
            dims: LinearCrossEntropyDims {
                rows,
                width,
                vocab,
                temperature,
            },
            hidden: random(1, rows * width),
            head: random(2, vocab * width),
            targets: (0..rows).map(|r| (r * 37 % vocab) as u32).collect(),
            d_log_prob: random(3, rows),
            d_entropy: random(4, rows),
        }
    }

    fn inputs(&self) -> HeadInputs<'_> {
        HeadInputs {
            hidden: &self.hidden,
            head: &self.head,
            targets: &self.targets,
        }
    }

    fn expected_gradients(&self, d_entropy: &[f32]) -> (Vec<f64>, Vec<f64>) {
        reference::backward(
            &self.dims,
            &wide(&self.hidden),
            &wide(&self.head),
            &self.targets,
            &wide(&self.d_log_prob),
            &wide(d_entropy),
        )
    }
}

#[test]
fn any_budget_agrees_with_the_reference() {
    for cpu in all_cpus() {
        for (rows, width, vocab) in [(1, 3, 7), (23, 16, 97), (40, 33, 131), (0, 3, 5)] {
            let case = Case::new(rows, width, vocab, 0.7);
            let rows_ref = reference::forward(
                &case.dims,
                &wide(&case.hidden),
                &wide(&case.head),
                &case.targets,
            );
            for budget in [0, 5 * 4 * vocab, usize::MAX] {
                let mut scratch = vec![f32::NAN; case.dims.scratch_len(budget)];
                let (mut log_prob, mut entropy) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
                let mut lse = vec![f64::NAN; rows];
                let outputs = HeadOutputs {
                    log_prob: &mut log_prob,
                    entropy: Some(&mut entropy),
                    lse: &mut lse,
                };
                forward(cpu, &case.dims, case.inputs(), outputs, &mut scratch);
                for r in 0..rows {
                    assert!((f64::from(log_prob[r]) - rows_ref[r].0).abs() <= 3e-6);
                    assert!((f64::from(entropy[r]) - rows_ref[r].1).abs() <= 3e-6);
                    assert!((lse[r] - rows_ref[r].2).abs() <= 3e-6);
                }
                check_two_passes(cpu, &case, &lse, &entropy, &mut scratch);
                check_one_pass(cpu, &case, &log_prob, &mut scratch);
            }
        }
    }
}

fn check_two_passes(cpu: Cpu, case: &Case, lse: &[f64], entropy: &[f32], scratch: &mut [f32]) {
    let (dhidden_ref, dhead_ref) = case.expected_gradients(&case.d_entropy);
    let mut dhidden = vec![f32::NAN; case.hidden.len()];
    let mut dhead = vec![0.25; case.head.len()];
    let derivatives = Derivatives {
        lse,
        d_log_prob: &case.d_log_prob,
        entropy: Some((entropy, &case.d_entropy)),
    };
    let gradients = HeadGradients {
        dhidden: &mut dhidden,
        dhead: &mut dhead,
        accumulate_dhead: true,
    };
    backward(
        cpu,
        &case.dims,
        case.inputs(),
        &derivatives,
        gradients,
        scratch,
    );
    assert_close("dhidden", &dhidden, &dhidden_ref, 2e-6);
    let plus: Vec<f64> = dhead_ref.iter().map(|x| x + 0.25).collect();
    assert_close("dhead", &dhead, &plus, 2e-6);
}

fn check_one_pass(cpu: Cpu, case: &Case, log_prob: &[f32], scratch: &mut [f32]) {
    let rows = case.dims.rows;
    let (dhidden_ref, dhead_ref) = case.expected_gradients(&vec![0.0; rows]);
    let mut dhidden = vec![f32::NAN; case.hidden.len()];
    let mut dhead = vec![f32::NAN; case.head.len()];
    let (mut again, mut lse) = (vec![f32::NAN; rows], vec![f64::NAN; rows]);
    let outputs = HeadOutputs {
        log_prob: &mut again,
        entropy: None,
        lse: &mut lse,
    };
    let gradients = HeadGradients {
        dhidden: &mut dhidden,
        dhead: &mut dhead,
        accumulate_dhead: false,
    };
    let inputs = case.inputs();
    forward_backward(
        cpu,
        &case.dims,
        inputs,
        &case.d_log_prob,
        outputs,
        gradients,
        scratch,
    );
    assert_eq!(again, log_prob);
    assert_close("dhidden", &dhidden, &dhidden_ref, 2e-6);
    assert_close("dhead", &dhead, &dhead_ref, 2e-6);
}

/// Known failure: a chunked log-prob whose backward pass is not bounded by the chunk.
#[test]
fn the_budget_bounds_the_logits() {
    let dims = LinearCrossEntropyDims {
        rows: 4096,
        width: 8,
        vocab: 8192,
        temperature: 1.0,
    };
    assert_eq!(dims.scratch_len(256 * 8192 * 4), 256 * 8192);
    assert_eq!(dims.scratch_len(usize::MAX), 4096 * 8192);
    assert_eq!(dims.scratch_len(1), 8192);
}

#[test]
#[should_panic(expected = "scratch has 6 elements, its dimensions need 7")]
fn scratch_below_one_row_is_refused() {
    let case = Case::new(2, 3, 7, 1.0);
    let (mut log_prob, mut lse) = ([0.0; 2], [0.0; 2]);
    let outputs = HeadOutputs {
        log_prob: &mut log_prob,
        entropy: None,
        lse: &mut lse,
    };
    forward(
        Cpu::new(1),
        &case.dims,
        case.inputs(),
        outputs,
        &mut [0.0; 6],
    );
}
