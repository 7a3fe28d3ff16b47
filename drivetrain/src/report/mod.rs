//! Reports a person opens: one HTML file, nothing fetched.

mod plots;

use std::path::Path;

use drivetrain_core::{Error, ErrorKind, Result};
use minijinja::{Environment, context};

use crate::run::{BackendRun, CompareReport};

/// Writes the page of a comparison: the verdict, the table, loss curves and step times.
///
/// # Errors
/// `File` naming the path.
pub fn write_compare(path: &Path, title: &str, report: &CompareReport) -> Result<()> {
    let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::File, "write_report", "cannot write the report")
            .with("file", path.display())
            .caused_by(cause)
    };
    let peak = |run: &BackendRun| format!("{} {:.1} GFLOP/s", run.backend, run.peak_flops / 1e9);
    let peaks: Vec<String> = report.runs.iter().map(peak).collect();
    let mut environment = Environment::new();
    environment
        .add_template("compare.html", include_str!("compare.html"))
        .map_err(|e| failed(e.into()))?;
    let page = environment
        .get_template("compare.html")
        .and_then(|template| {
            template.render(context! {
                title,
                parameters => report.parameters,
                tokens => report.tokens,
                peaks => peaks.join(", "),
                agrees => report.agrees(),
                losses => plots::losses(&report.runs),
                times => plots::step_times(&report.runs),
                rows => crate::tables::run_rows(&report.runs),
                run_header => crate::tables::RUN_HEADER,
                parity => crate::tables::parity_rows(&report.parity),
                parity_header => crate::tables::PARITY_HEADER,
                version => env!("CARGO_PKG_VERSION"),
            })
        })
        .map_err(|e| failed(e.into()))?;
    drivetrain_core::files::write_atomic(path, page.as_bytes())
}
