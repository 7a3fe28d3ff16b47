//! What ranks deposit, and how deposits combine.

use std::sync::Arc;

use crate::{
    Buffer, Error, ErrorKind, Result, View, ViewMut,
    communicator::{Input, ReduceOp, Shared, transport::reduce_in_rank_order},
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

    fn bytes(&self, start: usize, len: usize) -> &[u8] {
        let bytes = self.as_view().host_bytes().unwrap_or_default();
        &bytes[start..start + len]
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
    bytes[at * size..(at + len) * size].copy_from_slice(payload.bytes(start * size, len * size));
    Ok(())
}

/// Reduces the elements from `start` of every payload into the output.
pub(super) fn reduce_into(
    output: &mut ViewMut<'_>,
    payloads: &[Arc<Payload>],
    start: usize,
    op: ReduceOp,
) -> Result<()> {
    let size = output.dtype().size();
    let len = output.len();
    let parts = payloads.iter().map(|p| p.bytes(start * size, len * size));
    reduce_in_rank_order(output, &parts.collect::<Vec<_>>(), op)
}

pub(super) fn device_output() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "receive",
        "thread ranks communicate host memory only",
    )
}
