//! Subgroups: their ranks follow the given order, and they do not disturb each other.

use drivetrain_core::{Result, ViewMut, communicator::ReduceOp};

use super::{Body, Launch, each_rank};
use crate::suite::Findings;

pub(super) const CASES: &[(&str, Body)] = &[
    ("ranks_and_sizes", ranks_and_sizes),
    ("barrier", barrier),
    ("subgroup_order", subgroup_order),
    ("disjoint_subgroups", disjoint_subgroups),
    ("subgroup_of_one", subgroup_of_one),
];

fn ranks_and_sizes(launch: &Launch, findings: &mut Findings) -> Result<()> {
    for world in 1..=4 {
        each_rank(launch, world, findings, |c, f| {
            f.fact("world_size is what was asked for", c.world_size() == world);
            let mut seen = vec![0i64; world];
            seen[c.rank()] = 1;
            c.all_reduce(ViewMut::I64(&mut seen), ReduceOp::Sum)?
                .wait()?;
            f.fact("every rank is there once", seen == vec![1; world]);
            f.fact(
                "its members are all",
                c.members().iter().copied().eq(0..world),
            );
            Ok(())
        })?;
    }
    Ok(())
}

fn barrier(launch: &Launch, findings: &mut Findings) -> Result<()> {
    let arrived = std::sync::atomic::AtomicUsize::new(0);
    let relaxed = std::sync::atomic::Ordering::SeqCst;
    each_rank(launch, 4, findings, |c, f| {
        std::thread::sleep(std::time::Duration::from_millis(10 * c.rank() as u64));
        arrived.fetch_add(1, relaxed);
        c.barrier()?;
        f.fact("all have arrived", arrived.load(relaxed) == 4);
        Ok(())
    })
}

/// A group of ranks 2, 0 of 3: rank 2 is its first.
fn subgroup_order(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 3, findings, |c, f| {
        let me = c.rank();
        if me == 1 {
            return c.barrier();
        }
        let group = c.subgroup(&[2, 0], "pair")?;
        f.fact("its size", group.world_size() == 2);
        f.fact("its order", group.rank() == usize::from(me == 0));
        f.fact("its label", group.label() == "pair");
        f.fact("its members, in its order", group.members() == [2, 0]);
        let turned = group.subgroup(&[1, 0], "turned")?;
        f.fact("members are ranks of the world", turned.members() == [0, 2]);
        let own = [me as f32];
        let mut all = [f32::NAN; 2];
        group
            .all_gather((&own[..]).into(), ViewMut::F32(&mut all), &[1, 1])?
            .wait()?;
        f.fact("gathered in its order", all == [2.0, 0.0]);
        let mut root = [me as f32];
        group.broadcast(ViewMut::F32(&mut root), 0)?.wait()?;
        f.fact("roots are counted in it", root == [2.0]);
        c.barrier()
    })
}

/// Rows and columns of a 2 x 2 mesh, worked at the same time as the world.
fn disjoint_subgroups(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 4, findings, |c, f| {
        let me = c.rank();
        let (row, column) = (me / 2 * 2, me % 2);
        let rows = c.subgroup(&[row, row + 1], "row")?;
        let columns = c.subgroup(&[column, column + 2], "column")?;
        for _ in 0..3 {
            let mut by_row = [me as f64];
            let mut by_column = [me as f64];
            let mut by_all = [me as f64];
            let a = rows.all_reduce(ViewMut::F64(&mut by_row), ReduceOp::Sum)?;
            let b = columns.all_reduce(ViewMut::F64(&mut by_column), ReduceOp::Sum)?;
            let all = c.all_reduce(ViewMut::F64(&mut by_all), ReduceOp::Sum)?;
            all.wait()?;
            b.wait()?;
            a.wait()?;
            f.number("sum", "row", by_row[0], (2 * row + 1) as f64, 0.0);
            f.number("sum", "column", by_column[0], (2 * column + 2) as f64, 0.0);
            f.number("sum", "world", by_all[0], 6.0, 0.0);
        }
        Ok(())
    })
}

fn subgroup_of_one(launch: &Launch, findings: &mut Findings) -> Result<()> {
    each_rank(launch, 2, findings, |c, f| {
        let alone = c.subgroup(&[c.rank()], "alone")?;
        f.fact(
            "one member, rank 0",
            (alone.world_size(), alone.rank()) == (1, 0),
        );
        let mut buffer = [c.rank() as f64];
        alone
            .all_reduce(ViewMut::F64(&mut buffer), ReduceOp::Sum)?
            .wait()?;
        f.number("sum", "alone", buffer[0], c.rank() as f64, 0.0);
        alone.barrier()
    })
}
