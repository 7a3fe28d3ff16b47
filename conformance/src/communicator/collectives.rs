//! Values: of every operation, at every size, uneven counts and empty shares among them.

use std::sync::Arc;

use drivetrain_core::{
    Buffer, Result, ViewMut,
    communicator::{Communicator, Input, ReduceOp, Shared},
};
use half::bf16;

use super::{Body, Launch, each_rank};
use crate::{compare::Bound, suite::Findings};

pub(super) const CASES: &[(&str, Body)] = &[
    ("all_reduce_sum", all_reduce_sum),
    ("all_reduce_extremes", all_reduce_extremes),
    ("all_reduce_integers", all_reduce_integers),
    ("sums_in_rank_order", sums_in_rank_order),
    ("bf16_sums_in_f32", bf16_sums_in_f32),
    ("all_gather_uneven", all_gather_uneven),
    ("reduce_scatter_uneven", reduce_scatter_uneven),
    ("broadcast_from_each", broadcast_from_each),
    ("all_to_all_uneven", all_to_all_uneven),
    ("several_in_flight", several_in_flight),
];

pub(super) const SIZES: [usize; 4] = [0, 1, 5, 1031];

/// Element i of rank r: small whole numbers, so that sums are exact in every dtype.
fn value(rank: usize, i: usize) -> f64 {
    ((rank * 7 + i * 3) % 17) as f64 - 5.0
}

pub(super) fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i) as f32).collect()
}

pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

fn all_reduce_sum(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for world in 1..=4 {
        for len in SIZES {
            each_rank(launch, world, findings, |c, f| {
                let expected: Vec<f64> = (0..len)
                    .map(|i| (0..world).map(|r| value(r, i)).sum())
                    .collect();
                let mut narrow = values(c.rank(), len);
                c.all_reduce((&mut narrow).into(), ReduceOp::Sum)?.wait()?;
                f.check("f32", "", &wide(&narrow), &expected, Bound::Exact);
                let mut double = wide(&values(c.rank(), len));
                c.all_reduce((&mut double).into(), ReduceOp::Sum)?.wait()?;
                f.check("f64", "", &double, &expected, Bound::Exact);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// The largest and the smallest; a NaN wins, whichever rank has it.
fn all_reduce_extremes(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c, f| {
        for (op, expected) in [(ReduceOp::Max, 3.0), (ReduceOp::Min, 1.0)] {
            for bearer in 0..3 {
                let own = (c.rank() + 1) as f64;
                let poison = if c.rank() == bearer { f64::NAN } else { own };
                let mut buffer = [own, poison, f64::NEG_INFINITY];
                c.all_reduce(ViewMut::F64(&mut buffer), op)?.wait()?;
                f.number("extreme", &format!("{op:?}"), buffer[0], expected, 0.0);
                f.fact("a NaN wins", buffer[1].is_nan());
                f.fact("an infinity stays", buffer[2] == f64::NEG_INFINITY);
            }
        }
        Ok(())
    })
}

fn all_reduce_integers(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c, f| {
        let large = 1i64 << 53;
        let mut buffer = [large + c.rank() as i64, c.rank() as i64];
        c.all_reduce(ViewMut::I64(&mut buffer), ReduceOp::Sum)?
            .wait()?;
        f.fact("exact beyond f64", buffer == [3 * large + 3, 3]);
        let mut buffer = [large + c.rank() as i64];
        c.all_reduce(ViewMut::I64(&mut buffer), ReduceOp::Max)?
            .wait()?;
        f.fact("the largest, exactly", buffer == [large + 2]);
        Ok(())
    })
}

/// Sums are added in rank order, so that every rank has the same bits, and every run.
fn sums_in_rank_order(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let terms = [1.0f32, 1e-8, -1.0, 3e-8];
    let expected = terms.iter().sum::<f32>();
    each_rank(launch, 4, findings, |c, f| {
        let mut buffer = [terms[c.rank()]];
        c.all_reduce(ViewMut::F32(&mut buffer), ReduceOp::Sum)?
            .wait()?;
        f.check(
            "sum",
            "",
            &wide(&buffer),
            &[f64::from(expected)],
            Bound::Exact,
        );
        let input = [terms[c.rank()]; 4];
        let mut part = [f32::NAN];
        c.reduce_scatter(
            (&input[..]).into(),
            ViewMut::F32(&mut part),
            &[1; 4],
            ReduceOp::Sum,
        )?
        .wait()?;
        f.check(
            "part",
            "",
            &wide(&part),
            &[f64::from(expected)],
            Bound::Exact,
        );
        Ok(())
    })
}

/// 256 + 1 + 1 is 258; adding in bf16 would leave 256.
fn bf16_sums_in_f32(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c, f| {
        let own = if c.rank() == 0 { 256.0 } else { 1.0 };
        let mut buffer = [bf16::from_f64(own)];
        c.all_reduce(ViewMut::Bf16(&mut buffer), ReduceOp::Sum)?
            .wait()?;
        f.number("sum", "bf16", buffer[0].to_f64(), 258.0, 0.0);
        Ok(())
    })
}

fn all_gather_uneven(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for counts in [vec![3], vec![2, 0], vec![0, 5, 1], vec![1, 0, 0, 40]] {
        each_rank(launch, counts.len(), findings, |c, f| {
            let input = values(c.rank(), counts[c.rank()]);
            let mut output = vec![f32::NAN; counts.iter().sum()];
            c.all_gather((&input).into(), (&mut output).into(), &counts)?
                .wait()?;
            let parts = counts.iter().enumerate();
            let expected: Vec<_> = parts.flat_map(|(r, &n)| wide(&values(r, n))).collect();
            f.check("gathered", "", &wide(&output), &expected, Bound::Exact);
            let shared = Shared::new(Arc::new(Buffer::from(input)));
            let parts = c.all_gather_shared(shared, &counts)?.wait()?;
            let lens = parts.iter().map(|p| p.as_view().len() as f64);
            let lens: Vec<_> = lens.collect();
            let counted: Vec<_> = counts.iter().map(|&n| n as f64).collect();
            f.check("counts of parts", "", &lens, &counted, Bound::Exact);
            let mut joined = Vec::new();
            for part in &parts {
                joined.extend_from_slice(part.as_view().as_f32()?);
            }
            f.check("parts", "", &wide(&joined), &expected, Bound::Exact);
            Ok(())
        })?;
    }
    Ok(())
}

fn reduce_scatter_uneven(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for counts in [vec![3], vec![2, 0], vec![0, 5, 1], vec![1, 0, 0, 40]] {
        each_rank(launch, counts.len(), findings, |c, f| {
            let world = counts.len();
            let total = counts.iter().sum();
            let input = values(c.rank(), total);
            let mut output = vec![f32::NAN; counts[c.rank()]];
            c.reduce_scatter(
                (&input).into(),
                (&mut output).into(),
                &counts,
                ReduceOp::Sum,
            )?
            .wait()?;
            let start: usize = counts[..c.rank()].iter().sum();
            // The same out of a part of a buffer that is given away.
            let mut wider = vec![f32::NAN; 3];
            wider.extend(&input);
            let shared = Shared::new(Arc::new(Buffer::from(wider))).slice(3..3 + total);
            let mut again = vec![f32::NAN; counts[c.rank()]];
            let given = Input::Shared(shared);
            c.reduce_scatter(given, (&mut again).into(), &counts, ReduceOp::Sum)?
                .wait()?;
            let own = wide(&output);
            f.check("given away", "", &wide(&again), &own, Bound::Exact);
            let sum = |i| (0..world).map(|r| value(r, i)).sum();
            let expected: Vec<f64> = (start..start + counts[c.rank()]).map(sum).collect();
            f.check("scattered", "", &wide(&output), &expected, Bound::Exact);
            Ok(())
        })?;
    }
    Ok(())
}

fn broadcast_from_each(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for root in 0..3 {
        for len in SIZES {
            each_rank(launch, 3, findings, |c, f| {
                let mut buffer = vec![f32::NAN; len];
                if c.rank() == root {
                    buffer = values(root, len);
                }
                c.broadcast((&mut buffer).into(), root)?.wait()?;
                let expected = wide(&values(root, len));
                f.check("broadcast", "", &wide(&buffer), &expected, Bound::Exact);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Rank s sends s + 2 r elements to rank r, none to itself.
fn all_to_all_uneven(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let count = |from: usize, to: usize| if from == to { 0 } else { from + 2 * to };
    for world in 1..=4 {
        each_rank(launch, world, findings, |c, f| {
            let me = c.rank();
            let send: Vec<_> = (0..world).map(|to| count(me, to)).collect();
            let receive: Vec<_> = (0..world).map(|from| count(from, me)).collect();
            let message = |from: usize, to: usize| {
                let one = move |i| (100 * from + 10 * to + i) as f32;
                (0..count(from, to)).map(one).collect::<Vec<_>>()
            };
            let input: Vec<_> = (0..world).flat_map(|to| message(me, to)).collect();
            let mut output = vec![f32::NAN; receive.iter().sum()];
            c.all_to_all((&input).into(), &send, (&mut output).into(), &receive)?
                .wait()?;
            let expected: Vec<_> = (0..world).flat_map(|from| message(from, me)).collect();
            f.check(
                "received",
                "",
                &wide(&output),
                &wide(&expected),
                Bound::Exact,
            );
            Ok(())
        })?;
    }
    Ok(())
}

/// Operations that are started in one order may be waited for in another.
fn several_in_flight(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c: &dyn Communicator, f| {
        let me = c.rank();
        let (mut sum, own) = (values(me, 9), values(me, 2));
        let mut gathered = vec![f32::NAN; 6];
        let reduce = c.all_reduce((&mut sum).into(), ReduceOp::Sum)?;
        let gather = c.all_gather((&own).into(), (&mut gathered).into(), &[2; 3])?;
        gather.wait()?;
        reduce.wait()?;
        let expected: Vec<_> = (0..3).flat_map(|r| wide(&values(r, 2))).collect();
        f.check("gathered", "", &wide(&gathered), &expected, Bound::Exact);
        let expected: Vec<f64> = (0..9).map(|i| (0..3).map(|r| value(r, i)).sum()).collect();
        f.check("sum", "", &wide(&sum), &expected, Bound::Exact);
        Ok(())
    })
}
