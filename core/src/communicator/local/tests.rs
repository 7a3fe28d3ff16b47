use std::time::{Duration, Instant};

use super::*;
use crate::{View, communicator::SharedBuffer, launch::run_ranks};

const TIMEOUT: Duration = Duration::from_secs(20);

/// An f64 buffer is never filled with the bytes of f32.
#[test]
fn an_output_of_another_dtype_is_refused() {
    run_ranks(1, TIMEOUT, |comm| {
        let input = vec![1.0f32; 4];
        let refused = |work: Result<Work<'_>>| {
            let error = work.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Defect);
            assert_eq!(error.context("found"), Some("f64"));
        };
        let mut wide = vec![0.0f64; 4];
        refused(comm.all_gather((&input).into(), (&mut wide).into(), &[4]));
        refused(comm.reduce_scatter((&input).into(), (&mut wide).into(), &[4], ReduceOp::Sum));
        refused(comm.all_to_all((&input).into(), &[4], (&mut wide).into(), &[4]));
        Ok(())
    })
    .unwrap();
}

/// Memory that says when it is let go.
#[derive(Debug)]
struct Watched(Vec<f32>, Arc<Mutex<Vec<usize>>>, usize);

impl SharedBuffer for Watched {
    fn as_view(&self) -> View<'_> {
        (&self.0).into()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.lock().unwrap().push(self.2);
    }
}

/// Inputs that are shared are not copied, and go when the last rank is done with them.
#[test]
fn a_shared_input_is_read_where_it_lies_and_let_go_once() {
    let dropped = Arc::new(Mutex::new(Vec::new()));
    let ranks = run_ranks(3, TIMEOUT, |comm| {
        let rank = comm.rank();
        let own = Watched(vec![rank as f32; 4], dropped.clone(), rank);
        let own: Arc<dyn SharedBuffer> = Arc::new(own);
        let address = |shared: &Shared| shared.as_view().as_f32().unwrap().as_ptr() as usize;
        let shared = Shared::new(own.clone()).slice(1..3);
        let mine = address(&shared);
        let work = comm.all_gather_shared(shared, &[2; 3])?;
        let parts = work.wait()?;
        assert_eq!(parts[rank].as_view().as_f32()?, [rank as f32; 2]);
        let seen: Vec<usize> = parts.iter().map(address).collect();
        drop(parts);
        comm.barrier()?;
        assert!(!dropped.lock().unwrap().contains(&rank));
        let mut sum = [0.0f32; 4];
        let given = Input::Shared(Shared::new(own));
        let counts = [4, 0, 0];
        let work = comm.reduce_scatter(
            given,
            (&mut sum[..counts[rank]]).into(),
            &counts,
            ReduceOp::Sum,
        )?;
        work.wait()?;
        assert_eq!(sum[0], if rank == 0 { 3.0 } else { 0.0 });
        Ok((mine, seen))
    })
    .unwrap();
    let addresses: Vec<usize> = ranks.iter().map(|r| r.0).collect();
    for (_, seen) in &ranks {
        assert_eq!(seen, &addresses);
    }
    let mut gone = dropped.lock().unwrap().clone();
    gone.sort_unstable();
    assert_eq!(gone, [0, 1, 2]);
}

/// Whether an operation would block can be asked.
#[test]
fn work_is_ready_when_all_have_arrived() {
    run_ranks(2, TIMEOUT, |comm| {
        let mut values = [1.0f32];
        if comm.rank() == 0 {
            let work = comm.all_reduce(ViewMut::F32(&mut values), ReduceOp::Sum)?;
            assert!(!work.is_ready());
            comm.send(Buffer::U8(Vec::new()), 1)?.wait()?;
            comm.receive(DType::U8, 0, 1)?.wait()?;
            assert!(work.is_ready());
            work.wait()?;
        } else {
            comm.receive(DType::U8, 0, 0)?.wait()?;
            let work = comm.all_reduce(ViewMut::F32(&mut values), ReduceOp::Sum)?;
            comm.send(Buffer::U8(Vec::new()), 0)?.wait()?;
            work.wait()?;
        }
        assert_eq!(values, [2.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn collectives_give_every_rank_the_right_part() {
    let results = run_ranks(3, TIMEOUT, |comm| {
        let rank = comm.rank();
        let mut sum = vec![rank as f32 + 1.0; 4];
        comm.all_reduce((&mut sum).into(), ReduceOp::Sum)?.wait()?;
        assert_eq!(sum, [6.0; 4]);

        let counts = [2, 0, 1];
        let mine = vec![rank as i64; counts[rank]];
        let mut all = vec![-1i64; 3];
        comm.all_gather((&mine).into(), (&mut all).into(), &counts)?
            .wait()?;
        assert_eq!(all, [0, 0, 2]);

        let whole = vec![1.0f64, 2.0, 3.0];
        let mut part = vec![0.0f64; counts[rank]];
        comm.reduce_scatter((&whole).into(), (&mut part).into(), &counts, ReduceOp::Sum)?
            .wait()?;
        assert_eq!(part, [vec![3.0, 6.0], vec![], vec![9.0]][rank]);

        let send: Vec<i32> = (0..3)
            .flat_map(|to| vec![(10 * rank + to) as i32; to])
            .collect();
        let mut received = vec![0i32; rank * 3];
        comm.all_to_all(
            (&send).into(),
            &[0, 1, 2],
            (&mut received).into(),
            &[rank; 3],
        )?
        .wait()?;
        let want: Vec<i32> = (0..3)
            .flat_map(|from| vec![(10 * from + rank) as i32; rank])
            .collect();
        assert_eq!(received, want);

        let mut word = vec![rank as u8; 2];
        comm.broadcast((&mut word).into(), 2)?.wait()?;
        assert_eq!(word, [2, 2]);

        let next = (rank + 1) % 3;
        let sent = comm.send(vec![rank as f32].into(), next)?;
        let got = comm.receive(DType::F32, 1, (rank + 2) % 3)?.wait()?;
        sent.wait()?;
        assert_eq!(got, Buffer::F32(vec![((rank + 2) % 3) as f32]));
        comm.barrier()
    });
    assert!(results.is_ok(), "{results:?}");
}

#[test]
fn bf16_sums_accumulate_in_f32() {
    use half::bf16;
    run_ranks(3, TIMEOUT, |comm| {
        let mut v = vec![bf16::from_f32([256.0, 1.0, 1.0][comm.rank()])];
        comm.all_reduce((&mut v).into(), ReduceOp::Sum)?.wait()?;
        assert_eq!(v[0].to_f32(), 258.0);
        let mut m = vec![[1.0f32, f32::NAN, 3.0][comm.rank()]];
        comm.all_reduce((&mut m).into(), ReduceOp::Max)?.wait()?;
        assert!(m[0].is_nan());
        Ok(())
    })
    .unwrap();
}

#[test]
fn subgroups_are_independent() {
    run_ranks(4, TIMEOUT, |comm| {
        let ranks = if comm.rank() % 2 == 0 { [0, 2] } else { [1, 3] };
        let group = comm.subgroup(&ranks, "data_shard")?;
        let mut v = vec![comm.rank() as f64];
        group.sum_f64(&mut v)?;
        assert_eq!(v, [ranks.iter().sum::<usize>() as f64]);
        assert_eq!(group.rank(), comm.rank() / 2);
        Ok(())
    })
    .unwrap();
}

/// Many operations may be open at once; they end in any order.
#[test]
fn work_overlaps() {
    run_ranks(2, TIMEOUT, |comm| {
        let (mut a, mut b) = (vec![1.0f32; 8], vec![2.0f32; 8]);
        let first = comm.all_reduce((&mut a).into(), ReduceOp::Sum)?;
        let second = comm.all_reduce((&mut b).into(), ReduceOp::Sum)?;
        second.wait()?;
        first.wait()?;
        assert_eq!((a[0], b[0]), (2.0, 4.0));
        Ok(())
    })
    .unwrap();
}

/// Nothing is copied: the receiver has the sender's memory.
#[test]
fn a_buffer_that_is_sent_is_the_one_that_is_received() {
    let addresses = run_ranks(2, TIMEOUT, |comm| {
        if comm.rank() == 0 {
            let buffer = vec![1.0f32; 100];
            let address = buffer.as_ptr() as usize;
            comm.send(buffer.into(), 1)?.wait()?;
            return Ok(address);
        }
        let buffer: Vec<f32> = comm.receive(DType::F32, 100, 0)?.wait()?.try_into()?;
        Ok(buffer.as_ptr() as usize)
    })
    .unwrap();
    assert_eq!(addresses[0], addresses[1]);
}

/// What is dropped before it is waited for keeps nothing, whether the others have come or not.
#[test]
fn a_dropped_operation_leaves_nothing_behind() {
    let ends = LocalCommunicator::world(2, LocalOptions { timeout: TIMEOUT });
    let late = |rank: usize, first: bool| {
        let end = &ends[rank];
        let (mut sum, mut got) = ([1.0f32], [0.0f32]);
        let reduce = end.all_reduce(sum.as_mut_slice().into(), ReduceOp::Sum);
        let receive = end.receive(DType::F32, 1, 1 - rank);
        let input = [rank as f32];
        let exchange = end.exchange(
            input.as_slice().into(),
            1 - rank,
            got.as_mut_slice().into(),
            1 - rank,
        );
        if first {
            drop((reduce, receive, exchange));
            end.send(vec![5.0f32].into(), 1 - rank)
                .unwrap()
                .wait()
                .unwrap();
            return;
        }
        end.send(vec![5.0f32].into(), 1 - rank)
            .unwrap()
            .wait()
            .unwrap();
        reduce.unwrap().wait().unwrap();
        receive.unwrap().wait().unwrap();
        exchange.unwrap().wait().unwrap();
        assert_eq!(sum, [2.0]);
    };
    late(0, true);
    assert_eq!(ends[0].world.num_kept(), 5);
    late(1, false);
    assert_eq!(ends[0].world.num_kept(), 0);
}

/// R02: the culprit, the operation, its number and size are named, and nobody hangs.
#[test]
fn a_panicking_rank_ends_every_rank() {
    let begin = Instant::now();
    let error = run_ranks(4, TIMEOUT, |comm| {
        for step in 0..3 {
            assert!(!(comm.rank() == 2 && step == 2), "deliberate");
            comm.all_reduce((&mut vec![0.0f32; 5]).into(), ReduceOp::Sum)?
                .wait()?;
        }
        Ok(())
    })
    .unwrap_err();
    assert!(begin.elapsed() < TIMEOUT);
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::RankLost, "{text}");
    assert!(
        text.contains("rank = 2") && text.contains("deliberate"),
        "{text}"
    );
}

#[test]
fn a_late_rank_is_named_within_the_timeout() {
    let timeout = Duration::from_millis(200);
    let begin = Instant::now();
    let error = run_ranks(4, timeout, |comm| {
        if comm.rank() == 2 {
            std::thread::sleep(Duration::from_millis(900));
        }
        comm.all_reduce((&mut vec![0.0f32; 5]).into(), ReduceOp::Sum)?
            .wait()
    })
    .unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let text = error.to_string();
    for part in ["all_reduce", "[2]", "sequence = 1", "bytes = 20", "0.2 s"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// R03: a rank that has finished will not come.
#[test]
fn a_collective_called_by_rank_0_only_fails_at_once() {
    let begin = Instant::now();
    let error = run_ranks(2, TIMEOUT, |comm| {
        if comm.rank() == 0 {
            comm.barrier()
        } else {
            Ok(())
        }
    })
    .unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(error.kind(), ErrorKind::RankLost);
    assert!(error.to_string().contains("[1]"), "{error}");
}

#[test]
fn disagreement_names_both_sides() {
    let error = run_ranks(2, TIMEOUT, |comm| {
        let mut v = vec![0.0f32; 3 + comm.rank()];
        comm.all_reduce((&mut v).into(), ReduceOp::Sum)?.wait()
    })
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("[3]") && text.contains("[4]"), "{text}");
}
