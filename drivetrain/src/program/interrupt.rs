//! Ctrl-C and SIGTERM.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::core::{Error, ErrorKind, Result};

/// The first does `first`; the second ends the process at once.
pub(super) fn on_interrupt(first: impl Fn() + Send + 'static) -> Result<()> {
    let again = AtomicBool::new(false);
    ctrlc::set_handler(move || {
        if again.swap(true, Ordering::Relaxed) {
            end_at_once();
        }
        first();
    })
    .map_err(cannot_listen)
}

/// Does `each` every time.
#[cfg(feature = "gloo")]
pub(super) fn on_each_interrupt(each: impl Fn() + Send + 'static) -> Result<()> {
    ctrlc::set_handler(each).map_err(cannot_listen)
}

fn cannot_listen(cause: ctrlc::Error) -> Error {
    let message = "cannot listen for Ctrl-C";
    Error::new(ErrorKind::Device, "handle_interrupt", message).caused_by(cause)
}

/// Not `exit`: that runs destructors of libraries whose threads are still computing.
#[allow(unsafe_code)]
fn end_at_once() -> ! {
    // SAFETY: `_exit` takes a number and touches no memory.
    unsafe { libc::_exit(i32::from(ErrorKind::Interrupted.exit_code())) }
}
