//! NCCL: operations on f32 among the devices of several ranks.
//!
//! **It has never run**: there was no GPU. What can be tested without one is (`tests/cuda_libraries.rs`: the library
//! missing or incomplete).
//!
//! A communicator of NCCL is used by one thread. It is made not to block: a call that waits for other members says so, and
//! is asked again until it is done, the deadline has passed or [`NcclGroup::abort`] was called; then the communicator
//! is aborted, and every later call fails.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUresult, cuStreamQuery};
use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t, ncclResult_t};

use super::library::Library;
use super::{Buffer, CudaError, Device, Gpu};

/// By what the members of a group find each other.
pub type NcclId = [u8; 128];

/// This rank in a group of ranks, each with a device of its own.
#[derive(Debug)]
pub struct NcclGroup {
    device: Device,
    stream: sys::cudaStream_t,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// `None` once aborted.
    comm: Mutex<Option<Comm>>,
    aborted: AtomicBool,
}

#[derive(Debug)]
struct Comm(sys::ncclComm_t);

// SAFETY: NCCL's communicators may be used by any thread, one at a time; it is behind a lock.
unsafe impl Send for Comm {}
// SAFETY: the stream's handle may be used by any thread; the rest is behind locks.
unsafe impl Send for NcclGroup {}
// SAFETY: as above.
unsafe impl Sync for NcclGroup {}

impl Drop for Comm {
    fn drop(&mut self) {
        // SAFETY: made by `join` and used for the last time; nothing that is under way is wanted any more.
        let _ = unsafe { sys::ncclCommAbort(self.0) };
    }
}

/// What a device reads and writes in one operation.
struct Operands<'a> {
    comm: &'a Comm,
    stream: sys::cudaStream_t,
    input: u64,
    output: u64,
}

impl NcclGroup {
    /// An id for a new group, which its first member tells the others.
    ///
    /// # Errors
    /// If libnccl is missing or lacks a function.
    pub fn id() -> Result<NcclId, CudaError> {
        Library::Nccl.load()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: a place to write to.
        check("make an id", unsafe { sys::ncclGetUniqueId(&mut id) })?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Joins a group as member `rank` of `size`, on device `ordinal`, which no other member has. All members do so at the
    /// same time; no call takes longer than `timeout`.
    ///
    /// # Errors
    /// As [`NcclGroup::id`] and [`Gpu::open`]; NCCL's.
    pub fn join(
        ordinal: usize,
        id: &NcclId,
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Result<Self, CudaError> {
        Library::Nccl.load()?;
        let gpu = std::sync::Arc::new(Gpu::open(ordinal)?);
        let stream = gpu.stream()?.cast();
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as _),
        };
        let mut config = not_blocking();
        let mut comm = std::ptr::null_mut();
        // SAFETY: places to read and write; this thread is in the device's context.
        let started = unsafe {
            sys::ncclCommInitRankConfig(&mut comm, size as i32, id, rank as i32, &mut config)
        };
        let comm = (!comm.is_null()).then_some(Comm(comm));
        begun("join a group", started)?;
        let group = Self {
            device: Device::new(gpu),
            stream,
            rank,
            size,
            timeout,
            comm: Mutex::new(None),
            aborted: AtomicBool::new(false),
        };
        if let Some(comm) = &comm {
            group.settle("join a group", comm)?;
        }
        *group.lock() = comm;
        Ok(group)
    }

    /// Makes a call under way, and every later one, fail.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
    }

    /// The sum of every member's input.
    ///
    /// # Errors
    /// NCCL's, the device's; that the group was aborted or the deadline has passed.
    pub fn all_reduce(&self, input: &[f32]) -> Result<Vec<f32>, CudaError> {
        let count = input.len();
        self.run("all_reduce", input, count, |on| {
            // SAFETY: `count` elements lie at both addresses.
            let code = unsafe {
                sys::ncclAllReduce(on.from(0), on.to(0), count, F32, SUM, on.comm.0, on.stream)
            };
            begun("all_reduce", code)
        })
    }

    /// Every member's input, one after the other; member r gives `counts[r]` elements.
    ///
    /// # Errors
    /// As [`NcclGroup::all_reduce`].
    pub fn all_gather(&self, input: &[f32], counts: &[usize]) -> Result<Vec<f32>, CudaError> {
        assert_eq!(input.len(), counts[self.rank], "all_gather: input");
        self.run("all_gather", input, counts.iter().sum(), |on| {
            for (root, start, count) in parts(counts) {
                // SAFETY: the root's input and, at its place in the output, as many elements.
                let code = unsafe {
                    sys::ncclBroadcast(
                        on.from(0),
                        on.to(start),
                        count,
                        F32,
                        root,
                        on.comm.0,
                        on.stream,
                    )
                };
                begun("all_gather", code)?;
            }
            Ok(())
        })
    }

    /// The sum of every member's input, of which member r gets `counts[r]` elements.
    ///
    /// # Errors
    /// As [`NcclGroup::all_reduce`].
    pub fn reduce_scatter(&self, input: &[f32], counts: &[usize]) -> Result<Vec<f32>, CudaError> {
        assert_eq!(input.len(), counts.iter().sum(), "reduce_scatter: input");
        self.run("reduce_scatter", input, counts[self.rank], |on| {
            for (root, start, count) in parts(counts) {
                // SAFETY: each part lies in the input; the output, of the root's own part, is written by it alone.
                let code = unsafe {
                    sys::ncclReduce(
                        on.from(start),
                        on.to(0),
                        count,
                        F32,
                        SUM,
                        root,
                        on.comm.0,
                        on.stream,
                    )
                };
                begun("reduce_scatter", code)?;
            }
            Ok(())
        })
    }

    /// One member's input.
    ///
    /// # Errors
    /// As [`NcclGroup::all_reduce`].
    pub fn broadcast(&self, input: &[f32], root: usize) -> Result<Vec<f32>, CudaError> {
        let count = input.len();
        self.run("broadcast", input, count, |on| {
            // SAFETY: `count` elements lie at both addresses.
            let code = unsafe {
                sys::ncclBroadcast(
                    on.from(0),
                    on.to(0),
                    count,
                    F32,
                    root as i32,
                    on.comm.0,
                    on.stream,
                )
            };
            begun("broadcast", code)
        })
    }

    /// A part of the input for each member, `sent[r]` elements, and of each `received[r]`.
    ///
    /// # Errors
    /// As [`NcclGroup::all_reduce`].
    pub fn all_to_all(
        &self,
        input: &[f32],
        sent: &[usize],
        received: &[usize],
    ) -> Result<Vec<f32>, CudaError> {
        assert_eq!(input.len(), sent.iter().sum(), "all_to_all: input");
        self.run("all_to_all", input, received.iter().sum(), |on| {
            for (peer, start, count) in parts(sent) {
                // SAFETY: the part lies in the input.
                let code = unsafe {
                    sys::ncclSend(on.from(start), count, F32, peer, on.comm.0, on.stream)
                };
                begun("all_to_all", code)?;
            }
            for (peer, start, count) in parts(received) {
                // SAFETY: the part lies in the output.
                let code =
                    unsafe { sys::ncclRecv(on.to(start), count, F32, peer, on.comm.0, on.stream) };
                begun("all_to_all", code)?;
            }
            Ok(())
        })
    }

    /// Copies the input to the device, starts what `enqueue` does as one, waits, and copies the output back.
    fn run(
        &self,
        what: &str,
        input: &[f32],
        output: usize,
        enqueue: impl FnOnce(&Operands<'_>) -> Result<(), CudaError>,
    ) -> Result<Vec<f32>, CudaError> {
        let mut own = self.lock();
        let Some(comm) = own.as_ref() else {
            return Err(failed(what, "an earlier operation failed"));
        };
        let outcome = self.run_on(comm, what, input, output, enqueue);
        if outcome.is_err() {
            // Ends what is under way.
            *own = None;
        }
        outcome
    }

    fn run_on(
        &self,
        comm: &Comm,
        what: &str,
        input: &[f32],
        output_len: usize,
        enqueue: impl FnOnce(&Operands<'_>) -> Result<(), CudaError>,
    ) -> Result<Vec<f32>, CudaError> {
        // NCCL wants addresses where there is nothing, too. On a failure both are given back in the order of the stream:
        // after the operation, which the communicator's end ends.
        let input = match input {
            [] => self.device.zeros(1)?,
            _ => self.device.upload(input)?,
        };
        let output: Buffer<f32> = self.device.zeros(output_len.max(1))?;
        self.start(comm, what, (input.address(), output.address()), enqueue)?;
        self.finish(comm, what)?;
        let mut values = output.read()?;
        values.truncate(output_len);
        Ok(values)
    }

    fn start(
        &self,
        comm: &Comm,
        what: &str,
        (input, output): (u64, u64),
        enqueue: impl FnOnce(&Operands<'_>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let operands = Operands {
            comm,
            stream: self.stream,
            input,
            output,
        };
        // SAFETY: paired with the end below, whatever comes between.
        check(what, unsafe { sys::ncclGroupStart() })?;
        let enqueued = enqueue(&operands);
        // SAFETY: started above.
        let ended = begun(what, unsafe { sys::ncclGroupEnd() });
        enqueued.and(ended)?;
        self.settle(what, comm)
    }

    /// Waits until what was started is on the stream.
    fn settle(&self, what: &str, comm: &Comm) -> Result<(), CudaError> {
        self.until(what, || {
            let mut state = ncclResult_t::ncclSuccess;
            // SAFETY: the communicator lives.
            check(what, unsafe {
                sys::ncclCommGetAsyncError(comm.0, &mut state)
            })?;
            begun(what, state)?;
            Ok(state == ncclResult_t::ncclSuccess)
        })
    }

    /// Waits until the stream is done.
    fn finish(&self, comm: &Comm, what: &str) -> Result<(), CudaError> {
        self.until(what, || {
            // SAFETY: the stream is of the device, which lives.
            match unsafe { cuStreamQuery(self.stream.cast()) } {
                CUresult::CUDA_SUCCESS => Ok(true),
                CUresult::CUDA_ERROR_NOT_READY => {
                    let mut state = ncclResult_t::ncclSuccess;
                    // SAFETY: the communicator lives.
                    check(what, unsafe {
                        sys::ncclCommGetAsyncError(comm.0, &mut state)
                    })?;
                    begun(what, state)?;
                    Ok(false)
                }
                error => Err(failed(what, &format!("{error:?}"))),
            }
        })
    }

    fn until(
        &self,
        what: &str,
        mut done: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), CudaError> {
        let began = Instant::now();
        while !done()? {
            if self.aborted.load(Ordering::SeqCst) {
                return Err(failed(what, "the group was aborted"));
            }
            if began.elapsed() > self.timeout {
                let members = self.size;
                let reason = format!("not done by all {members} members in {:?}", self.timeout);
                return Err(failed(what, &reason));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Comm>> {
        self.comm
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

const F32: ncclDataType_t = ncclDataType_t::ncclFloat32;
const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

impl Operands<'_> {
    /// The input from an element on.
    fn from(&self, element: usize) -> *const c_void {
        (self.input + (element * size_of::<f32>()) as u64) as *const c_void
    }

    /// The output from an element on.
    fn to(&self, element: usize) -> *mut c_void {
        (self.output + (element * size_of::<f32>()) as u64) as *mut c_void
    }
}

/// Member, first element and number of elements of each part that is not empty.
fn parts(counts: &[usize]) -> impl Iterator<Item = (i32, usize, usize)> {
    let mut end = 0;
    let parts = counts.iter().enumerate().map(move |(member, &count)| {
        end += count;
        (member as i32, end - count, count)
    });
    parts.filter(|(_, _, count)| *count > 0)
}

/// NCCL's `NCCL_CONFIG_INITIALIZER`, and that calls do not block.
fn not_blocking() -> sys::ncclConfig_t {
    const UNDEFINED: i32 = i32::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 22_200,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
    }
}

/// Done, or under way.
fn begun(what: &str, code: ncclResult_t) -> Result<(), CudaError> {
    match code {
        ncclResult_t::ncclInProgress => Ok(()),
        code => check(what, code),
    }
}

fn check(what: &str, code: ncclResult_t) -> Result<(), CudaError> {
    match code {
        ncclResult_t::ncclSuccess => Ok(()),
        code => Err(failed(what, &format!("{code:?}"))),
    }
}

fn failed(what: &str, reason: &str) -> CudaError {
    CudaError::Call {
        what: format!("NCCL: {what}"),
        reason: reason.to_owned(),
    }
}
