//! Tests of the emulator itself: what it must get right, and defects that it must name.

use drivetrain_kernels::cuda::{Arg, Driver, Launch};
use libtest_mimic::{Failed, Trial};

use crate::emulator::{Emulator, Order, PROBE};

/// Threads, blocks, elements of the buffer, and the error's words (a thread of them), or the result.
struct Probe {
    kernel: &'static str,
    blocks: u32,
    threads: u32,
    expect: Expect,
}

enum Expect {
    /// Of the buffer, which held 0, 1, 2, ..
    Result(fn(usize) -> f32),
    Error(&'static [&'static str]),
}

const LEN: usize = 96;

const PROBES: &[Probe] = &[
    probe(
        "probe_atomics",
        1,
        96,
        Expect::Result(|i| match i {
            0 => 4560.0,
            1 => 1.0 + 96.0,
            2 => 2.0 + 48.0,
            _ => i as f32,
        }),
    ),
    probe(
        "probe_shuffles",
        1,
        32,
        Expect::Result(|i| match (i / 3, i % 3) {
            (lane, 0) => (lane ^ 5) as f32,
            (_, 1) => 7.0,
            (lane, _) => (if lane + 3 < 32 { lane + 3 } else { lane }) as f32,
        }),
    ),
    probe("probe_reverse", 1, 96, Expect::Result(|i| (95 - i) as f32)),
    probe(
        "probe_reverse_warps",
        1,
        96,
        Expect::Result(|i| (i / 32 * 32 + 31 - i % 32) as f32),
    ),
    probe(
        "probe_race",
        1,
        96,
        Expect::Error(&["race", "shared memory"]),
    ),
    probe(
        "probe_late_write",
        1,
        96,
        Expect::Error(&["race: ", "byte 0 of shared memory"]),
    ),
    probe(
        "probe_blocks_collide",
        2,
        96,
        Expect::Error(&[
            "block (1,0,0)",
            "race: writes byte ",
            "of block 0 has written",
        ]),
    ),
    probe(
        "probe_before_the_start",
        1,
        96,
        Expect::Error(&[
            "thread (0,0,0): out of bounds: element -1 of parameter 0, which has 96 elements of 4 bytes",
        ]),
    ),
    probe(
        "probe_beyond_shared",
        1,
        32,
        Expect::Error(&[
            "thread (31,0,0): out of bounds: element 31 of shared memory, which has 31 elements",
        ]),
    ),
    probe(
        "probe_unwritten_shared",
        1,
        32,
        Expect::Error(&["of shared memory, which nothing has written"]),
    ),
    probe(
        "probe_divergent_barrier",
        1,
        96,
        Expect::Error(&[
            "divergent barrier: __syncthreads at probe.cu:",
            "has returned",
        ]),
    ),
    probe(
        "probe_two_barriers",
        1,
        96,
        Expect::Error(&["divergent barrier", "probe.cu"]),
    ),
    probe(
        "probe_exited_lane",
        1,
        32,
        Expect::Error(&["names lane 9, which has returned"]),
    ),
    probe(
        "probe_deadlock",
        1,
        32,
        Expect::Error(&[
            "divergent barrier",
            "waits in the warp operation at probe.cu:",
        ]),
    ),
    probe(
        "probe_atomics",
        1,
        2048,
        Expect::Error(&["invalid configuration", "(2048,1,1)"]),
    ),
    probe(
        "probe_absent",
        1,
        32,
        Expect::Error(&["no kernel probe_absent"]),
    ),
];

const fn probe(kernel: &'static str, blocks: u32, threads: u32, expect: Expect) -> Probe {
    Probe {
        kernel,
        blocks,
        threads,
        expect,
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = PROBES
        .iter()
        .enumerate()
        .map(|(i, probe)| {
            Trial::test(format!("emulator::{} {i}", probe.kernel), move || {
                for order in [Order::Forward, Order::Backward] {
                    run(&Emulator::new(order), probe, LEN, &[])?;
                }
                Ok(())
            })
        })
        .collect();
    trials.push(Trial::test("emulator::arguments", arguments));
    trials
}

/// The error or the buffer, compared with what is expected. `more` follows the buffer in the arguments.
fn run(emulator: &Emulator, probe: &Probe, len: usize, more: &[Arg]) -> Result<(), Failed> {
    let before: Vec<u8> = (0..len).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    let address = emulator.allocate(len, 4)?;
    let buffer = Arg::Pointer {
        address,
        reach: before.len() as u64,
    };
    let args = [&[buffer], more].concat();
    let launch = Launch {
        module: &PROBE,
        kernel: probe.kernel,
        grid: [probe.blocks, 1, 1],
        block: [probe.threads, 1, 1],
        shared_bytes: 512,
        args: &args,
    };
    let mut after = vec![0; before.len()];
    // SAFETY: the emulator checks every access, which is what is tested here.
    let result = unsafe {
        emulator.upload(&before, address)?;
        let result = emulator.launch(&launch);
        emulator.download(address, &mut after)?;
        emulator.free(address);
        result
    };
    match (&probe.expect, result) {
        (Expect::Result(expected), Ok(())) => {
            for (i, bytes) in after.chunks(4).enumerate() {
                let found = f32::from_ne_bytes(bytes.try_into().expect("four bytes"));
                if found != expected(i) {
                    return Err(format!("element {i}: {found} for {}", expected(i)).into());
                }
            }
            Ok(())
        }
        (Expect::Error(words), Err(error)) => {
            let text = error.to_string();
            match words.iter().find(|word| !text.contains(**word)) {
                Some(word) => Err(format!("found {text:?}, which lacks {word:?}").into()),
                None => Ok(()),
            }
        }
        (Expect::Result(_), Err(error)) => Err(error.into()),
        (Expect::Error(words), Ok(())) => Err(format!("not found: {words:?}").into()),
    }
}

/// Arguments that are not the kernel's, buffers nobody wrote, a vector that is not aligned.
fn arguments() -> Result<(), Failed> {
    let emulator = Emulator::new(Order::Forward);
    let fresh = Arg::Pointer {
        address: emulator.allocate(LEN, 4)?,
        reach: 4 * LEN as u64,
    };
    let cases: [(&'static str, &[Arg], &'static [&'static str]); 7] = [
        (
            "probe_beyond_the_end",
            &[Arg::U32(LEN as u32)],
            &[
                "probe_beyond_the_end, block (0,0,0), thread (96,0,0): out of bounds: element 96 of parameter 0",
            ],
        ),
        (
            "probe_beyond_the_end",
            &[],
            &["takes 2 arguments, the launch gives 1"],
        ),
        (
            "probe_beyond_the_end",
            &[Arg::U64(1)],
            &["parameter 1: the number's size differs"],
        ),
        (
            "probe_beyond_the_end",
            &[Arg::NULL],
            &["the kernel takes a number, the launch gives a pointer"],
        ),
        (
            "probe_unwritten",
            &[Arg::U32(1)],
            &["the kernel takes a pointer, the launch gives a number"],
        ),
        (
            "probe_misaligned",
            &[fresh],
            &["misaligned: 16 bytes at element 1 of parameter 0"],
        ),
        (
            "probe_unwritten",
            &[Arg::Pointer {
                address: 64,
                reach: 4,
            }],
            &["not of a device buffer"],
        ),
    ];
    for (kernel, more, words) in cases {
        run(
            &emulator,
            &probe(kernel, 1, 128, Expect::Error(words)),
            LEN,
            more,
        )?;
    }
    // The buffer nobody wrote comes first, so the kernel reads it.
    let args = [fresh, fresh];
    let launch = Launch {
        module: &PROBE,
        kernel: "probe_unwritten",
        grid: [1; 3],
        block: [32, 1, 1],
        shared_bytes: 0,
        args: &args,
    };
    // SAFETY: as above.
    let error = unsafe { emulator.launch(&launch) }.expect_err("nothing wrote the buffer");
    let words = "thread (0,0,0): reads byte 0 of parameter 0, which nothing has written";
    if error.to_string().contains(words) {
        Ok(())
    } else {
        Err(error.into())
    }
}
