//! What ranks give to an operation.

use std::{fmt, ops::Range, sync::Arc};

use crate::{Buffer, View};

/// Memory that an operation may hold for as long as any rank needs it.
///
/// Dropped by whichever rank is done with it last, perhaps on that rank's thread: memory that belongs to a pool goes
/// back there in its `Drop`.
pub trait SharedBuffer: fmt::Debug + Send + Sync {
    /// What it holds, the same for as long as it is shared.
    fn as_view(&self) -> View<'_>;
}

impl SharedBuffer for Buffer {
    fn as_view(&self) -> View<'_> {
        Self::as_view(self)
    }
}

/// A range of elements of a shared buffer.
#[derive(Debug, Clone)]
pub struct Shared {
    buffer: Arc<dyn SharedBuffer>,
    range: Range<usize>,
}

impl Shared {
    /// All of a buffer.
    pub fn new(buffer: Arc<dyn SharedBuffer>) -> Self {
        let range = 0..buffer.as_view().len();
        Self { buffer, range }
    }

    /// These of its elements.
    pub fn slice(&self, range: Range<usize>) -> Self {
        let start = self.range.start;
        Self {
            buffer: Arc::clone(&self.buffer),
            range: start + range.start..start + range.end,
        }
    }

    /// What it holds.
    pub fn as_view(&self) -> View<'_> {
        self.buffer.as_view().slice(self.range.clone())
    }
}

/// What a rank gives to an operation.
#[derive(Debug)]
pub enum Input<'a> {
    /// Borrowed until the operation ends. A transport whose other ranks may need it longer copies it.
    Borrowed(View<'a>),
    /// Held until no rank needs it any more: thread ranks read each other's memory and copy nothing.
    Shared(Shared),
}

impl Input<'_> {
    /// What is given.
    pub fn as_view(&self) -> View<'_> {
        match self {
            Self::Borrowed(view) => *view,
            Self::Shared(shared) => shared.as_view(),
        }
    }
}

impl<'a, T> From<T> for Input<'a>
where
    View<'a>: From<T>,
{
    fn from(view: T) -> Self {
        Self::Borrowed(view.into())
    }
}
