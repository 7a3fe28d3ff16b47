//! Rows of the tables that the terminal and the reports show.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets::UTF8_HORIZONTAL_ONLY};

use crate::run::{BackendRun, Parity};

/// Columns of a run.
pub const RUN_HEADER: [&str; 8] = [
    "backend",
    "ranks",
    "ms/step",
    "CPU s/step",
    "tokens/s",
    "MFU",
    "peak memory",
    "last loss",
];

/// Columns of a parity row.
pub const PARITY_HEADER: [&str; 7] = [
    "backend",
    "against",
    "quantity",
    "worst gap",
    "tolerance",
    "share",
    "verdict",
];

/// A row a run.
pub fn run_rows(runs: &[BackendRun]) -> Vec<Vec<String>> {
    runs.iter()
        .map(|r| {
            vec![
                r.backend.clone(),
                r.ranks.to_string(),
                format!("{:.1}", r.step_seconds * 1e3),
                format!("{:.3}", r.cpu_seconds),
                format!("{:.0}", r.tokens_per_second),
                format!("{:.0}%", r.mfu * 100.0),
                r.peak_memory.map_or("-".to_owned(), mebibytes),
                r.losses
                    .last()
                    .map_or("-".to_owned(), |l| format!("{l:.6}")),
            ]
        })
        .collect()
}

/// Three rows an engine: log-probs, gradient, weights.
pub fn parity_rows(parity: &[Parity]) -> Vec<Vec<String>> {
    let row = |p: &Parity, c: &crate::conformance::compare::Comparison| {
        let quantity = if c.of.is_empty() {
            c.quantity.clone()
        } else {
            format!("{} ({})", c.quantity, c.of)
        };
        vec![
            p.backend.clone(),
            p.truth.clone(),
            quantity,
            format!("{:.2e}", c.error),
            format!("{:.2e}", c.tolerance),
            format!("{:.3}", c.share),
            if c.passed() {
                "agrees".to_owned()
            } else {
                "DISAGREES".to_owned()
            },
        ]
    };
    parity
        .iter()
        .flat_map(|p| p.comparisons().map(|c| row(p, c)))
        .collect()
}

/// A table for the terminal: the first column left, numbers right.
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_HORIZONTAL_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Bytes in MiB.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}
