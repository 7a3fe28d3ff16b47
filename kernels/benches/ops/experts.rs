//! A mixture of experts: X 8 experts of which a token goes to k 2, each half as wide as the dense layer.

use drivetrain_kernels::ops::grouped_gemm::{self, GroupedDims};
use drivetrain_kernels::ops::permute::{self, Order, PermuteDims};
use drivetrain_kernels::ops::router::{self, Derivatives, RouterDims, Routing};

use crate::report::{Report, Work};
use crate::{D, F, T, values};

const X: usize = 8;
const TOP_K: usize = 2;
const ROWS: usize = T * TOP_K;

pub(crate) fn experts(report: &mut Report<'_>) {
    let dims = RouterDims {
        tokens: T,
        experts: X,
        top_k: TOP_K,
        renormalise: true,
    };
    let logits = values(T * X);
    let (mut probs, mut lse) = (logits.clone(), vec![0.0; T]);
    let (mut chosen, mut weights) = (vec![0; ROWS], vec![0.0; ROWS]);
    let mut run = |cpu| {
        let routing = Routing {
            probs: &mut probs,
            lse: &mut lse,
            experts: &mut chosen,
            weights: &mut weights,
        };
        router::forward(cpu, &dims, &logits, None, routing);
    };
    run(report.cpu);
    report.run("router/forward", Work::Bytes(4 * 2 * T * X), run);
    let d_weights = values(ROWS);
    let derivatives = Derivatives {
        probs: &probs,
        experts: &chosen,
        weights: &weights,
        d_weights: &d_weights,
        d_probs: None,
        d_lse: None,
    };
    let mut dlogits = logits.clone();
    report.run("router/backward", Work::Bytes(4 * 2 * T * X), |cpu| {
        router::backward(cpu, &dims, &derivatives, &mut dlogits);
    });

    let mut offsets = vec![0; X + 1];
    let (mut slots, mut rows) = (vec![0; ROWS], vec![0; ROWS]);
    report.run("permute/sort", Work::Bytes(4 * 4 * ROWS), |_| {
        permute::sort(&chosen, &mut offsets, &mut slots, &mut rows);
    });
    permute::sort(&chosen, &mut offsets, &mut slots, &mut rows);
    let order = Order {
        slots: &slots,
        rows: &rows,
    };
    let dims = PermuteDims {
        tokens: T,
        top_k: TOP_K,
        width: D,
    };
    let x = values(T * D);
    let (mut y, mut dy, mut out) = (values(ROWS * D), values(ROWS * D), values(T * D));
    let mut dw = weights.clone();
    report.run("permute/permute", Work::Bytes(4 * (T + ROWS) * D), |cpu| {
        permute::permute(cpu, &dims, &order, &x, &mut y);
    });
    let bytes = Work::Bytes(4 * (2 * T + ROWS) * D);
    report.run("permute/unpermute", bytes, |cpu| {
        permute::unpermute(cpu, &dims, &order, &y, &weights, true, &mut out);
    });
    let bytes = Work::Bytes(4 * (T + 2 * ROWS) * D);
    report.run("permute/unpermute_backward", bytes, |cpu| {
        permute::unpermute_backward(cpu, &dims, &order, &x, &y, &weights, &mut dy, &mut dw);
    });

    // Gate and up in one weight.
    let dims = GroupedDims {
        offsets: &offsets,
        inputs: D,
        outputs: F,
    };
    let (weight, mut hidden) = (values(X * F * D), values(ROWS * F));
    let mut dweight = weight.clone();
    let work = Work::Flops(2.0 * (ROWS * D * F) as f64);
    report.run("grouped_gemm/forward", work, |cpu| {
        grouped_gemm::forward(cpu, &dims, &y, &weight, &mut hidden);
    });
    report.run("grouped_gemm/backward_input", work, |cpu| {
        grouped_gemm::backward_input(cpu, &dims, &hidden, &weight, false, &mut dy);
    });
    report.run("grouped_gemm/backward_weight", work, |cpu| {
        grouped_gemm::backward_weight(cpu, &dims, &hidden, &y, true, &mut dweight);
    });
}
