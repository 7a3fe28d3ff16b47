//! What ranks deposit, and how deposits combine.

use std::sync::Arc;

use half::{bf16, f16};

use crate::{
    Buffer, Error, ErrorKind, Result, View, ViewMut,
    communicator::{Input, ReduceOp, Shared},
};

/// A rank's input: what it gave away or shares, or a copy.
#[derive(Debug)]
pub(super) struct Payload {
    data: Data,
    counts: Vec<usize>,
}

#[derive(Debug)]
enum Data {
    /// For one rank, which gets it.
    Given(Buffer),
    /// For whoever reads it.
    Shared(Shared),
}

impl Payload {
    /// Of a rank that gives nothing.
    pub(super) fn empty() -> Self {
        Self::given(Buffer::U8(Vec::new()))
    }

    pub(super) fn given(buffer: Buffer) -> Self {
        Self::new(Data::Given(buffer))
    }

    fn new(data: Data) -> Self {
        Self {
            data,
            counts: Vec::new(),
        }
    }

    pub(super) fn of(operation: &'static str, input: Input<'_>) -> Result<Self> {
        let host = match &input {
            Input::Shared(shared) => {
                let host = shared.as_view().host_bytes().is_some();
                host.then(|| shared.clone())
            }
            Input::Borrowed(view) => Buffer::copy(*view).map(|copy| Shared::new(Arc::new(copy))),
        };
        let data = host.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                operation,
                "thread ranks communicate host memory only",
            )
            .with("found", format!("{:?}", input.as_view().device()))
        })?;
        Ok(Self::new(Data::Shared(data)))
    }

    pub(super) fn with_counts(mut self, counts: &[usize]) -> Self {
        self.counts = counts.to_vec();
        self
    }

    pub(super) fn counts(&self) -> &[usize] {
        &self.counts
    }

    pub(super) fn as_view(&self) -> View<'_> {
        match &self.data {
            Data::Given(buffer) => buffer.as_view(),
            Data::Shared(shared) => shared.as_view(),
        }
    }

    /// What a collective was given.
    pub(super) fn shared(&self) -> Option<&Shared> {
        match &self.data {
            Data::Given(_) => None,
            Data::Shared(shared) => Some(shared),
        }
    }

    /// For its only receiver.
    pub(super) fn into_buffer(self) -> Option<Buffer> {
        match self.data {
            Data::Given(buffer) => Some(buffer),
            Data::Shared(shared) => Buffer::copy(shared.as_view()),
        }
    }

    /// `T` is of the data's dtype (descriptors were compared), or a byte.
    fn elements<T: bytemuck::AnyBitPattern>(&self, start: usize, len: usize) -> &[T] {
        let bytes = self.as_view().host_bytes().unwrap_or_default();
        let size = size_of::<T>();
        bytemuck::cast_slice(&bytes[start * size..(start + len) * size])
    }
}

/// Copies `len` elements of a payload into a view at `at`. Dtypes are equal: descriptors were compared.
pub(super) fn copy_into(
    output: &mut ViewMut<'_>,
    at: usize,
    payload: &Payload,
    start: usize,
    len: usize,
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let size = payload.as_view().dtype().size();
    let Some(bytes) = output.host_bytes_mut() else {
        return Err(device_output());
    };
    bytes[at * size..(at + len) * size]
        .copy_from_slice(&payload.elements::<u8>(start * size, len * size)[..len * size]);
    Ok(())
}

/// Reduces the elements from `start` of every payload into the output.
pub(super) fn reduce_into(
    output: &mut ViewMut<'_>,
    payloads: &[Arc<Payload>],
    start: usize,
    op: ReduceOp,
) -> Result<()> {
    match output {
        ViewMut::F64(out) => float(out, payloads, start, op),
        ViewMut::F32(out) => float(out, payloads, start, op),
        ViewMut::Bf16(out) => half(out, payloads, start, op, bf16::to_f32, bf16::from_f32),
        ViewMut::F16(out) => half(out, payloads, start, op, f16::to_f32, f16::from_f32),
        ViewMut::I64(out) => integer(out, payloads, start, op, i64::wrapping_add),
        ViewMut::I32(out) => integer(out, payloads, start, op, i32::wrapping_add),
        ViewMut::U8(out) => integer(out, payloads, start, op, u8::wrapping_add),
        ViewMut::Device(_) => return Err(device_output()),
    }
    Ok(())
}

pub(super) fn device_output() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "receive",
        "thread ranks communicate host memory only",
    )
}

fn float<T>(out: &mut [T], payloads: &[Arc<Payload>], start: usize, op: ReduceOp)
where
    T: bytemuck::AnyBitPattern + Copy + std::ops::AddAssign + PartialOrd,
{
    let len = out.len();
    for (rank, payload) in payloads.iter().enumerate() {
        let values: &[T] = payload.elements(start, len);
        if rank == 0 {
            out.copy_from_slice(values);
            continue;
        }
        let pairs = out.iter_mut().zip(values);
        match op {
            ReduceOp::Sum => pairs.for_each(|(o, &v)| *o += v),
            ReduceOp::Max => pairs.for_each(|(o, &v)| {
                let better = v > *o;
                keep(o, v, better);
            }),
            ReduceOp::Min => pairs.for_each(|(o, &v)| {
                let better = v < *o;
                keep(o, v, better);
            }),
        }
    }
}

/// Replaces `kept` by `value` if it is better or not a number.
#[allow(
    clippy::eq_op,
    reason = "only a NaN differs from itself, for any float type"
)]
fn keep<T: PartialOrd>(kept: &mut T, value: T, better: bool) {
    if better || value != value {
        *kept = value;
    }
}

fn half<T>(
    out: &mut [T],
    payloads: &[Arc<Payload>],
    start: usize,
    op: ReduceOp,
    widen: impl Fn(T) -> f32,
    round: impl Fn(f32) -> T,
) where
    T: bytemuck::AnyBitPattern,
{
    let columns: Vec<&[T]> = payloads
        .iter()
        .map(|p| p.elements(start, out.len()))
        .collect();
    for (i, o) in out.iter_mut().enumerate() {
        let mut values = columns.iter().map(|c| widen(c[i]));
        let mut kept = values.next().unwrap_or(0.0);
        for v in values {
            match op {
                ReduceOp::Sum => kept += v,
                ReduceOp::Max => {
                    let better = v > kept;
                    keep(&mut kept, v, better);
                }
                ReduceOp::Min => {
                    let better = v < kept;
                    keep(&mut kept, v, better);
                }
            }
        }
        *o = round(kept);
    }
}

fn integer<T>(
    out: &mut [T],
    payloads: &[Arc<Payload>],
    start: usize,
    op: ReduceOp,
    add: impl Fn(T, T) -> T,
) where
    T: bytemuck::AnyBitPattern + Ord,
{
    let len = out.len();
    for (rank, payload) in payloads.iter().enumerate() {
        let values: &[T] = payload.elements(start, len);
        if rank == 0 {
            out.copy_from_slice(values);
            continue;
        }
        for (o, &v) in out.iter_mut().zip(values) {
            *o = match op {
                ReduceOp::Sum => add(*o, v),
                ReduceOp::Max => v.max(*o),
                ReduceOp::Min => v.min(*o),
            };
        }
    }
}
