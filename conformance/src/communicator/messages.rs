//! Messages between two ranks: sent, received, exchanged, and matched by their order.

use drivetrain_core::{
    Buffer, DType, Error, ErrorKind, Result, ViewMut,
    communicator::{Communicator, ReduceOp, Work},
};

use super::{
    Body, Launch, PATIENCE,
    collectives::{SIZES, values, wide},
    each_rank,
};
use crate::{compare::Bound, suite::Findings};

pub(super) const CASES: &[(&str, Body)] = &[
    ("send_and_receive_in_order", send_and_receive),
    ("every_dtype_is_sent", every_dtype),
    ("exchange_round_a_ring", exchange_round_a_ring),
    ("exchange_of_two_sizes", exchange_of_two_sizes),
    ("exchange_meets_send_and_receive", exchange_meets_send),
    ("pipeline_of_stored_messages", pipeline),
    ("dropped_work_disturbs_nobody", dropped_work),
    ("wrong_size_names_both_ranks", wrong_size),
];

fn received(work: Work<'_, Buffer>) -> Result<Vec<f32>> {
    work.wait()?.try_into()
}

/// A ring; two messages to the same rank arrive in the order they were sent.
fn send_and_receive(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for world in 2..=4 {
        each_rank(launch, world, findings, |c, f| {
            let (me, n) = (c.rank(), c.world_size());
            let (next, before) = ((me + 1) % n, (me + n - 1) % n);
            // A receive that is started before the send of its rank waits for it.
            let x = c.receive(DType::F32, 5, before)?;
            let y = c.receive(DType::F32, 3, before)?;
            let a = c.send(values(me, 5).into(), next)?;
            let b = c.send(values(me + 50, 3).into(), next)?;
            let (y, x) = (received(y)?, received(x)?);
            a.wait()?;
            b.wait()?;
            let (first, second) = (values(before, 5), values(before + 50, 3));
            f.check("first", "", &wide(&x), &wide(&first), Bound::Exact);
            f.check("second", "", &wide(&y), &wide(&second), Bound::Exact);
            Ok(())
        })?;
    }
    Ok(())
}

fn every_dtype(launch: &Launch, findings: &mut Findings) -> Result<()> {
    use half::{bf16, f16};
    each_rank(launch, 2, findings, |c, f| {
        let buffers = [
            Buffer::F64(vec![1.5, -0.0]),
            Buffer::F32(vec![2.5]),
            Buffer::Bf16(vec![bf16::from_f32(3.5); 3]),
            Buffer::F16(vec![f16::from_f32(4.5); 5]),
            Buffer::I64(vec![i64::MIN, 7]),
            Buffer::I32(vec![-8; 4]),
            Buffer::U8(vec![9; 7]),
            Buffer::F32(Vec::new()),
        ];
        for buffer in buffers {
            let peer = 1 - c.rank();
            let (dtype, len) = (buffer.dtype(), buffer.len());
            let got = c.receive(dtype, len, peer)?;
            c.send(buffer.clone(), peer)?.wait()?;
            f.fact(&format!("{dtype} x {len}"), got.wait()? == buffer);
        }
        Ok(())
    })
}

/// After as many steps as ranks, everybody has seen every block, and has its own again.
fn exchange_round_a_ring(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for world in 1..=4 {
        for len in SIZES {
            each_rank(launch, world, findings, |c, f| {
                let me = c.rank();
                let (next, before) = ((me + 1) % world, (me + world - 1) % world);
                let mut block = values(me, len);
                for step in 1..=world {
                    let mut other = vec![f32::NAN; len];
                    c.exchange((&block).into(), next, (&mut other).into(), before)?
                        .wait()?;
                    block = other;
                    let expected = values((me + world - step) % world, len);
                    f.check("block", "", &wide(&block), &wide(&expected), Bound::Exact);
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// What is sent and what is received need not be of one size, nor to and from one rank.
fn exchange_of_two_sizes(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c, f| {
        let size = |rank: usize| 4 * rank + 1;
        for (to, from) in [(1, 2), (2, 1)] {
            let (to, from) = ((c.rank() + to) % 3, (c.rank() + from) % 3);
            let own = values(c.rank(), size(c.rank()));
            let mut other = vec![f32::NAN; size(from)];
            c.exchange((&own).into(), to, (&mut other).into(), from)?
                .wait()?;
            let expected = wide(&values(from, size(from)));
            f.check("other", "", &wide(&other), &expected, Bound::Exact);
        }
        Ok(())
    })
}

/// One end exchanges, the other sends and receives.
fn exchange_meets_send(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 2, findings, |c, f| {
        let peer = 1 - c.rank();
        let expected = wide(&values(peer, 6));
        let other = if c.rank() == 0 {
            let mut other = vec![f32::NAN; 6];
            c.exchange((&values(0, 6)).into(), 1, (&mut other).into(), 1)?
                .wait()?;
            other
        } else {
            let got = c.receive(DType::F32, 6, 0)?;
            let sent = c.send(values(1, 6).into(), 0)?;
            sent.wait()?;
            received(got)?
        };
        f.check("other", "", &wide(&other), &expected, Bound::Exact);
        Ok(())
    })
}

/// Messages are started, kept, and waited for later, in another order, as a pipeline's stages do.
fn pipeline(launch: &Launch, findings: &mut Findings) -> Result<()> {
    const COUNT: usize = 5;
    each_rank(launch, 3, findings, |c, f| {
        let me = c.rank();
        let mut sent: Vec<Work<'static>> = Vec::new();
        let mut coming: Vec<(usize, Work<'static, Buffer>)> = Vec::new();
        for n in 0..COUNT {
            if me > 0 {
                coming.push((n, c.receive(DType::F32, 9 + n, me - 1)?));
            }
            if me < 2 {
                sent.push(c.send(values(10 * me + n, 9 + n).into(), me + 1)?);
            }
        }
        for (n, work) in coming.into_iter().rev() {
            let expected = wide(&values(10 * (me - 1) + n, 9 + n));
            f.check(
                "message",
                "",
                &wide(&received(work)?),
                &expected,
                Bound::Exact,
            );
        }
        sent.into_iter().try_for_each(Work::wait)
    })
}

/// Whoever does not wait takes part all the same, and what comes later is right.
fn dropped_work(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c: &dyn Communicator, f| {
        let (me, n) = (c.rank(), c.world_size());
        for dropper in 0..n {
            let mut sum = [me as f64];
            let reduce = c.all_reduce(ViewMut::F64(&mut sum), ReduceOp::Sum)?;
            let ignored = c.receive(DType::F32, 4, (me + 2) % n)?;
            if me == dropper {
                drop(ignored);
                drop(reduce);
                c.send(values(me, 4).into(), (me + 1) % n)?.wait()?;
            } else {
                c.send(values(me, 4).into(), (me + 1) % n)?.wait()?;
                reduce.wait()?;
                f.number("sum", "of the others", sum[0], 3.0, 0.0);
                let expected = wide(&values((me + 2) % n, 4));
                f.check(
                    "message",
                    "",
                    &wide(&received(ignored)?),
                    &expected,
                    Bound::Exact,
                );
            }
        }
        let mut sum = [me as f64];
        c.all_reduce(ViewMut::F64(&mut sum), ReduceOp::Sum)?
            .wait()?;
        f.number("sum", "after all", sum[0], 3.0, 0.0);
        let got = c.receive(DType::F32, 2, (me + 2) % n)?;
        c.send(values(me, 2).into(), (me + 1) % n)?.wait()?;
        let expected = wide(&values((me + 2) % n, 2));
        f.check(
            "the next message",
            "",
            &wide(&received(got)?),
            &expected,
            Bound::Exact,
        );
        Ok(())
    })
}

/// In a group of ranks 2 and 1 the error speaks of these.
fn wrong_size(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let outcome = launch(3, PATIENCE, &|c| {
        if c.rank() == 0 {
            return Ok(());
        }
        let pair = c.subgroup(&[2, 1], "pair")?;
        if pair.rank() == 0 {
            return pair.send(values(0, 5).into(), 1)?.wait();
        }
        received(pair.receive(DType::F32, 4, 0)?).map(drop)
    });
    let error = outcome.err();
    let context = |key| error.as_ref().and_then(|e: &Error| e.context(key));
    findings.fact(
        "it is a defect",
        error.as_ref().map(Error::kind) == Some(ErrorKind::Defect),
    );
    findings.fact("the receiver", context("rank") == Some("1"));
    findings.fact("the sender", context("from") == Some("2"));
    findings.fact("the group", context("group") == Some("pair"));
    findings.fact("what was wanted", context("expected") == Some("f32 x 4"));
    findings.fact("what came", context("found") == Some("f32 x 5"));
    Ok(())
}
