//! Progress on a terminal as a bar, elsewhere (CI logs) as a line every few seconds.

use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

const LOG_EVERY: Duration = Duration::from_secs(5);

/// The progress of one download or unpacking, in bytes.
#[derive(Debug)]
pub(crate) struct Progress {
    what: String,
    bar: Option<ProgressBar>,
    total: Cell<Option<u64>>,
    started: Instant,
    logged: Cell<Instant>,
}

impl Progress {
    /// Starts with an unknown total.
    pub(crate) fn bytes(what: &str) -> Progress {
        let now = Instant::now();
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::no_length().with_message(what.to_owned());
            bar.set_style(style(
                "{spinner} {msg} {decimal_bytes} so far, {decimal_bytes_per_sec}",
            ));
            bar
        });
        if bar.is_none() {
            eprintln!("{what} ...");
        }
        let (total, logged) = (Cell::new(None), Cell::new(now));
        Progress {
            what: what.to_owned(),
            bar,
            total,
            started: now,
            logged,
        }
    }

    /// States the total once it is known.
    pub(crate) fn set_total(&self, bytes: u64) {
        self.total.set(Some(bytes));
        if let Some(bar) = &self.bar {
            bar.set_length(bytes);
            bar.set_style(style(
                "{bar:30} {msg} {decimal_bytes}/{decimal_total_bytes} eta {eta}",
            ));
        }
    }

    /// States how many bytes are done.
    pub(crate) fn set(&self, bytes: u64) {
        // pip copies a finished download: for a moment there is more than the total.
        let bytes = self.total.get().map_or(bytes, |total| bytes.min(total));
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
        } else if self.logged.get().elapsed() >= LOG_EVERY {
            self.logged.set(Instant::now());
            let of = self
                .total
                .get()
                .map(|total| format!(" of {}", DecimalBytes(total)));
            eprintln!(
                "{}: {}{}",
                self.what,
                DecimalBytes(bytes),
                of.unwrap_or_default()
            );
        }
    }

    /// Replaces the bar by one line that stays.
    pub(crate) fn finish(self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.started.elapsed().as_secs_f64();
        eprintln!("{}: {} in {seconds:.1} s", self.what, DecimalBytes(bytes));
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates in this file are valid")
}
