//! Every case of the suite of communicators over Gloo: each rank with a connection of its own, all in this process.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use drivetrain_c10d::{
    Rendezvous, Store, connect,
    in_one_process::{RankMain, run_once},
};
use drivetrain_conformance::communicator::{Launch, communicator_cases};
use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    communicator::{Communicator, ReduceOp},
    launch::run_ranks,
};
use libtest_mimic::{Arguments, Failed, Trial};

fn rendezvous(rank: usize, world_size: usize, port: u16, timeout: Duration) -> Rendezvous {
    Rendezvous {
        rank,
        world_size,
        host: "127.0.0.1".to_owned(),
        port,
        launcher_keeps_store: true,
        name: "test".to_owned(),
        meeting_timeout: timeout,
        timeout,
        interface: None,
    }
}

const PATIENCE: Duration = Duration::from_secs(20);

fn each(world_size: usize, body: RankMain<'_>) -> std::result::Result<(), Failed> {
    run_once(world_size, PATIENCE, body).map_err(|error| error.to_string().into())
}

/// A rank, what it reduced, and its part of a reduction that was scattered.
type Sums = (usize, Vec<f32>, Vec<f32>);

/// Thirds of f32: the bits of thread ranks, in one stage and two.
fn the_bits_of_thread_ranks() -> std::result::Result<(), Failed> {
    for ranks in [2, 3, 4] {
        for len in [0, 5, 4000, 50_001] {
            let results: Mutex<Vec<Sums>> = Mutex::default();
            let body = |world: Arc<dyn Communicator>| {
                let rank = world.rank();
                let input: Vec<f32> = (0..len)
                    .map(|i| ((i * 31 + rank * 17) % 97) as f32 / 3.0)
                    .collect();
                let mut all = input.clone();
                let first = world.all_reduce((&mut all).into(), ReduceOp::Sum)?;
                let counts: Vec<usize> = (0..ranks)
                    .map(|r| len / ranks + usize::from(r < len % ranks))
                    .collect();
                let mut part = vec![0.0; counts[rank]];
                world
                    .reduce_scatter((&input).into(), (&mut part).into(), &counts, ReduceOp::Sum)?
                    .wait()?;
                first.wait()?;
                results.lock().unwrap().push((rank, all, part));
                Ok(())
            };
            each(ranks, &body)?;
            let mut over_gloo = std::mem::take(&mut *results.lock().unwrap());
            run_ranks(ranks, PATIENCE, body)?;
            let mut threads = std::mem::take(&mut *results.lock().unwrap());
            over_gloo.sort_by_key(|r| r.0);
            threads.sort_by_key(|r| r.0);
            if over_gloo != threads {
                return Err(format!("{ranks} ranks, {len} elements").into());
            }
        }
    }
    Ok(())
}

/// Two all-reduces of two stages, waited for in another order by each rank.
fn stages_go_on_whoever_is_waited_for() -> std::result::Result<(), Failed> {
    each(3, &|world| {
        let mut first = vec![1.0f32; 40_000];
        let mut second = vec![2.0f32; 40_000];
        let a = world.all_reduce((&mut first).into(), ReduceOp::Sum)?;
        let b = world.all_reduce((&mut second).into(), ReduceOp::Sum)?;
        if world.rank() == 1 {
            b.wait()?;
            a.wait()?;
        } else {
            a.wait()?;
            world.barrier()?;
            b.wait()?;
        }
        if world.rank() == 1 {
            world.barrier()?;
        }
        assert!(first.iter().all(|&x| x == 3.0) && second.iter().all(|&x| x == 6.0));
        Ok(())
    })
}

/// A rank that waits for another that is stuck is not blamed for it.
fn who_is_stuck_is_named() -> std::result::Result<(), Failed> {
    let errors: Mutex<Vec<(usize, Error)>> = Mutex::default();
    let timeout = Duration::from_secs(3);
    let outcome = run_once(3, timeout, &|world| {
        world.barrier()?;
        let outcome = match world.rank() {
            // Waits for 1, which waits for 2, which sleeps.
            0 => world.receive(DType::F32, 4, 1)?.wait().map(drop),
            1 => {
                thread::sleep(Duration::from_millis(300));
                world.receive(DType::F32, 4, 2)?.wait().map(drop)
            }
            _ => {
                thread::sleep(timeout + Duration::from_secs(2));
                Ok(())
            }
        };
        if let Err(error) = &outcome {
            errors
                .lock()
                .unwrap()
                .push((world.rank(), error.duplicate()));
        }
        outcome
    });
    let Some(first) = outcome.err() else {
        return Err("nobody noticed".into());
    };
    let named = first.context("missing") == Some("[2]") && first.kind() == ErrorKind::Timeout;
    match named && errors.lock().unwrap().len() == 2 {
        true => Ok(()),
        false => Err(format!("{first}\n{errors:?}").into()),
    }
}

/// A taken port, a rank that does not come, a rank that is taken, ranks that disagree.
fn meetings_that_fail_say_why() -> std::result::Result<(), Failed> {
    // A name server that does not answer takes ten seconds a name.
    let short = Duration::from_secs(30);
    let says = |outcome: Result<()>, words: &[&str]| match outcome {
        Ok(()) => Err(Failed::from(format!("no error: {words:?}"))),
        Err(error) => {
            let text = error.to_string();
            let all = words.iter().all(|word| text.contains(word));
            all.then_some(()).ok_or_else(|| Failed::from(text))
        }
    };
    let store = Store::serve(0, 3 * PATIENCE)?;
    let port = store.port();
    let port_text = port.to_string();
    let taken = Rendezvous {
        launcher_keeps_store: false,
        ..rendezvous(0, 2, port, short)
    };
    says(
        connect(&taken).map(drop),
        &["taken", &port_text, "MASTER_PORT"],
    )?;
    let began = Instant::now();
    let alone = connect(&rendezvous(1, 3, port, short)).map(drop);
    says(alone, &["[0, 2] did not come", "missing"])?;
    if began.elapsed() > short + Duration::from_secs(5) {
        return Err("late".into());
    }
    says(
        connect(&rendezvous(1, 3, port, short)).map(drop),
        &["two processes are rank 1"],
    )?;
    let name = |name: &str, meet: Rendezvous| Rendezvous {
        name: name.to_owned(),
        ..meet
    };
    let (a, b) = thread::scope(|scope| {
        let a = scope.spawn(|| connect(&name("sizes", rendezvous(0, 2, port, short))).map(drop));
        let b = scope.spawn(|| connect(&name("sizes", rendezvous(1, 3, port, short))).map(drop));
        (a.join().unwrap(), b.join().unwrap())
    });
    says(a, &["disagree on how many", "3 (rank 1)"])?;
    says(b, &["did not come", "[2]"])?;
    drop(store);
    let gone = connect(&rendezvous(1, 2, port, short)).map(drop);
    says(gone, &["rank 0's store was not found", &port_text])
}

type Test = fn() -> std::result::Result<(), Failed>;

fn main() -> ExitCode {
    let over_gloo: Launch = Arc::new(run_once);
    let mut cases = communicator_cases("gloo", &over_gloo);
    let own: [(&str, Test); 4] = [
        ("the_bits_of_thread_ranks", the_bits_of_thread_ranks),
        (
            "stages_go_on_whoever_is_waited_for",
            stages_go_on_whoever_is_waited_for,
        ),
        ("who_is_stuck_is_named", who_is_stuck_is_named),
        ("meetings_that_fail_say_why", meetings_that_fail_say_why),
    ];
    cases.extend(own.map(|(name, body)| Trial::test(name, body)));
    let mut arguments = Arguments::from_args();
    // They wait more than they compute.
    arguments.test_threads = arguments.test_threads.or(Some(8));
    libtest_mimic::run(&arguments, cases).exit_code()
}
