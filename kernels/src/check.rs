//! Length checks at the public edge of every op.

/// Panics unless `slice` has `expected` elements, naming it: the caller's shapes disagree with its buffers.
#[track_caller]
pub(crate) fn len<T>(name: &str, slice: &[T], expected: usize) {
    assert!(
        slice.len() == expected,
        "{name} has {} elements, its dimensions say {expected}",
        slice.len()
    );
}

/// As [`len`], for a slice that may be longer (scratch, tables).
#[track_caller]
pub(crate) fn at_least<T>(name: &str, slice: &[T], expected: usize) {
    assert!(
        slice.len() >= expected,
        "{name} has {} elements, its dimensions need {expected}",
        slice.len()
    );
}
