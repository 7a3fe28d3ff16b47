//! What a step costs under an engine: a JSON line, with the keys of the peers' scripts, or a table of such
//! lines. See benches/README.md.
#![forbid(unsafe_code)]

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use drivetrain::tables::table;
use drivetrain_benches::{SIZES, Size, measure};
use serde_json::Value;

#[derive(Debug, Parser)]
#[command(about = "What a step costs under an engine")]
struct Arguments {
    /// tiny, small or ragged
    #[arg(long, default_value = "tiny")]
    size: String,
    /// Engine
    #[arg(long, default_value = "megatron")]
    backend: String,
    /// Data-parallel thread ranks
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Threads a rank
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// A setting of the job, `key.path=value`, such as `precision.saved_activations=bf16`; may be repeated
    #[arg(long = "set")]
    sets: Vec<String>,
    /// Steps before those that count
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Steps that count
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Append the line to this file
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print the lines of this file, ours and the peers', as a table instead
    #[arg(long)]
    table: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Arguments::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    if let Some(path) = &args.table {
        return print_table(path);
    }
    let names = SIZES.map(|s| s.name).join(", ");
    let size = Size::named(&args.size).ok_or(format!("no size {:?}; one of {names}", args.size))?;
    let cost = measure(
        size,
        &args.backend,
        args.ranks,
        args.threads,
        &args.sets,
        args.warmup,
        args.steps.max(1),
    )?;
    let line = serde_json::to_string(&cost)?;
    println!("{line}");
    if let Some(path) = &args.out {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)?;
        writeln!(file, "{line}")?;
    }
    Ok(())
}

/// Each line's CPU seconds, and how many times the least of its size that is.
fn print_table(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(path)?;
    let lines: Vec<Value> = text
        .lines()
        .filter(|l| !l.trim().is_empty())
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let word = |v: &Value, keys: &[&str]| {
        let found: Vec<&str> = keys.iter().filter_map(|k| v[*k].as_str()).collect();
        found.join(" ")
    };
    let cpu = |v: &Value| v["cpu_s_step"].as_f64().unwrap_or(f64::NAN);
    let rows = lines
        .iter()
        .map(|v| {
            let size = word(v, &["size"]);
            let least = lines
                .iter()
                .filter(|o| word(o, &["size"]) == size)
                .map(cpu)
                .fold(f64::INFINITY, f64::min);
            vec![
                word(v, &["backend", "model", "mode"]),
                size,
                format!("{:.3}", cpu(v)),
                format!("{:.2}x", cpu(v) / least),
            ]
        })
        .collect();
    println!(
        "{}",
        table(&["engine", "size", "CPU s/step", "to the least"], rows)
    );
    Ok(())
}
