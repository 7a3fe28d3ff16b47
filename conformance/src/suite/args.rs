//! The suite's own arguments; all others are those of `cargo test`.

use std::path::PathBuf;

use libtest_mimic::Arguments;

use super::Settings;

/// What a run of the suite was asked for.
#[derive(Debug, Clone, Default)]
pub struct SuiteArgs {
    /// The test harness's arguments: a filter, `--list`, `--test-threads`, ...
    pub harness: Arguments,
    /// Where every comparison is written as JSON.
    pub report: Option<PathBuf>,
    /// Whether each reason why cases were not asked of a backend is printed, not only their number.
    pub verbose: bool,
    /// Seed and number of generated cases.
    pub settings: Settings,
}

impl SuiteArgs {
    /// Reads `--verbose`, `--all`, `--report FILE`, `--seed N` and `--generated N` (also as `--key=value`) and leaves the rest to
    /// the harness. `DRIVETRAIN_CONFORMANCE_SEED` sets the seed where no argument does.
    ///
    /// # Errors
    /// A sentence that says which argument is wrong.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self::default();
        if let Ok(seed) = std::env::var("DRIVETRAIN_CONFORMANCE_SEED") {
            parsed.settings.seed = number("DRIVETRAIN_CONFORMANCE_SEED", &seed)?;
        }
        let mut rest = vec!["conformance".to_owned()];
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            if arg == "--verbose" {
                parsed.verbose = true;
                continue;
            }
            if arg == "--all" {
                parsed.settings.all = true;
                continue;
            }
            let (key, value) = match arg.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (arg.clone(), None),
            };
            if !matches!(key.as_str(), "--report" | "--seed" | "--generated") {
                rest.push(arg);
                continue;
            }
            let value = value
                .or_else(|| args.next())
                .ok_or_else(|| format!("{key} needs a value"))?;
            match key.as_str() {
                "--report" => parsed.report = Some(value.into()),
                "--seed" => parsed.settings.seed = number(&key, &value)?,
                _ => parsed.settings.generated = number(&key, &value)?,
            }
        }
        parsed.harness = Arguments::from_iter(rest);
        Ok(parsed)
    }
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    let parsed = value.parse();
    parsed.map_err(|_| format!("{key} needs a whole number, found {value:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_arguments_are_taken_and_the_rest_is_left() {
        let args = [
            "--seed",
            "7",
            "golden",
            "--report=r.json",
            "--exact",
            "--verbose",
            "--all",
        ];
        let parsed = SuiteArgs::parse(args.map(str::to_owned)).unwrap();
        assert_eq!(parsed.settings.seed, 7);
        assert_eq!(parsed.report, Some("r.json".into()));
        assert_eq!(parsed.harness.filter.as_deref(), Some("golden"));
        assert!(parsed.harness.exact && parsed.verbose && parsed.settings.all);
        assert!(SuiteArgs::parse(["--seed".to_owned()]).is_err());
        assert!(SuiteArgs::parse(["--seed=x".to_owned()]).is_err());
    }
}
