//! The architecture check: which package may depend on which, and what source may not contain.

mod graph;
mod source;

use anyhow::Result;
use std::process::ExitCode;

/// Prints every violation, and how many packages and files were looked at.
pub(crate) fn run() -> Result<ExitCode> {
    let root = crate::workspace::root();
    let packages = graph::read(&root)?;
    let files = source::tracked_files(&root)?;
    let mut violations = graph::violations(&packages);
    violations.extend(source::violations(&files));
    for violation in &violations {
        println!("violation: {violation}");
    }
    println!(
        "arrows: {} packages, {} files, {} violations",
        packages.len(),
        files.len(),
        violations.len()
    );
    Ok(if violations.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
