//! What ran: reads the output of `cargo test` line by line and adds it up.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// One test program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target {
    pub(super) package: String,
    pub(super) name: String,
}

/// Sums over tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Count {
    fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// All test programs that ran.
#[derive(Debug, Default)]
pub(super) struct Report {
    targets: BTreeMap<Target, Count>,
}

impl Report {
    /// Starts reading the output of one `cargo test`. `program` knows the programs by their path.
    pub(super) fn section<'a, P>(&'a mut self, program: P, suffix: &'a str) -> Section<'a, P>
    where
        P: Fn(&str) -> Option<Target>,
    {
        Section {
            report: self,
            program,
            suffix,
            open: None,
            failed_before: 0,
        }
        .started()
    }

    /// How many tests ran (passed or failed) in the targets for which `select` holds.
    pub(super) fn ran(&self, select: impl Fn(&Target) -> bool) -> u64 {
        let selected = self.targets.iter().filter(|(target, _)| select(target));
        selected.map(|(_, count)| count.passed + count.failed).sum()
    }

    fn sum(&self) -> Count {
        let mut sum = Count::default();
        self.targets.values().for_each(|count| sum.add(*count));
        sum
    }

    pub(super) fn is_green(&self) -> bool {
        let sum = self.sum();
        sum.failed == 0 && sum.passed > 0
    }

    /// `N passed, N failed, N skipped`.
    pub(super) fn closing_line(&self) -> String {
        let Count {
            passed,
            failed,
            skipped,
        } = self.sum();
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }

    /// A line for each package.
    pub(super) fn table(&self) -> String {
        let mut packages: BTreeMap<&str, (u64, Count)> = BTreeMap::new();
        for (target, count) in &self.targets {
            let row = packages.entry(&target.package).or_default();
            row.0 += 1;
            row.1.add(*count);
        }
        let mut table = String::new();
        let mut row = |package: &str, columns: [String; 4]| {
            let [programs, passed, failed, skipped] = columns;
            writeln!(
                table,
                "{package:<36}{programs:>9}{passed:>9}{failed:>9}{skipped:>9}"
            )
            .expect("writing to a String");
        };
        row(
            "package",
            ["programs", "passed", "failed", "skipped"].map(str::to_owned),
        );
        for (package, (programs, count)) in packages {
            let columns = [programs, count.passed, count.failed, count.skipped];
            row(package, columns.map(|column| column.to_string()));
        }
        table
    }
}

/// The output of one `cargo test`, being read.
#[derive(Debug)]
pub(super) struct Section<'a, P> {
    report: &'a mut Report,
    program: P,
    suffix: &'a str,
    open: Option<Open>,
    failed_before: u64,
}

/// The program that is running.
#[derive(Debug)]
struct Open {
    target: Target,
    is_doctest: bool,
    count: Option<Count>,
}

impl<P: Fn(&str) -> Option<Target>> Section<'_, P> {
    fn started(mut self) -> Self {
        self.failed_before = self.report.sum().failed;
        self
    }

    pub(super) fn line(&mut self, line: &str) {
        if let Some(open) = heading(line, &self.program) {
            self.close();
            self.open = Some(open);
        } else if let (Some(open), Some(count)) = (&mut self.open, result(line)) {
            match &mut open.count {
                // Doc tests are run in several batches, each with its result.
                Some(sum) if open.is_doctest => sum.add(count),
                // A test may print the results of a suite that it runs: a program's own come last.
                slot => *slot = Some(count),
            }
        }
    }

    /// A program without a result crashed, or tests nothing that anybody can see: a failure.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let count = open.count.unwrap_or_else(|| {
            println!(
                "{} of {}: ended without a result",
                open.target.name, open.target.package
            );
            Count {
                failed: 1,
                ..Count::default()
            }
        });
        self.add(open.target, count);
    }

    fn add(&mut self, mut target: Target, count: Count) {
        target.package += self.suffix;
        self.report.targets.entry(target).or_default().add(count);
    }

    /// Ends the section. A failure that no result showed is counted as one failed test.
    pub(super) fn end(mut self, success: bool) {
        self.close();
        if !success && self.report.sum().failed == self.failed_before {
            let target = Target {
                package: "cargo test".to_owned(),
                name: "cargo".to_owned(),
            };
            self.add(
                target,
                Count {
                    failed: 1,
                    ..Count::default()
                },
            );
        }
    }
}

/// `Running unittests src/lib.rs (target/release/deps/a-0123)` or `Doc-tests a`.
fn heading(line: &str, program: impl Fn(&str) -> Option<Target>) -> Option<Open> {
    let line = line.trim_start();
    if let Some(library) = line.strip_prefix("Doc-tests ") {
        let package = library.trim().replace('_', "-");
        let target = Target {
            package,
            name: "doc tests".to_owned(),
        };
        return Some(Open {
            target,
            is_doctest: true,
            count: None,
        });
    }
    let (_, path) = line
        .strip_prefix("Running ")?
        .strip_suffix(')')?
        .rsplit_once(" (")?;
    Some(Open {
        target: program(path)?,
        is_doctest: false,
        count: None,
    })
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in ...`
fn result(line: &str) -> Option<Count> {
    let fields = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let number = |label: &str| {
        let mut fields = fields.split(';').map(str::trim);
        fields.find_map(|field| field.strip_suffix(label)?.trim().parse::<u64>().ok())
    };
    Some(Count {
        passed: number(" passed")?,
        failed: number(" failed")?,
        skipped: number(" ignored")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(package: &str, name: &str) -> Target {
        Target {
            package: package.to_owned(),
            name: name.to_owned(),
        }
    }

    fn read(output: &str, success: bool) -> Report {
        let mut report = Report::default();
        let program = |path: &str| match path {
            "target/release/deps/one-01" => Some(target("one", "one")),
            "target/release/deps/conformance-02" => Some(target("two", "conformance")),
            _ => None,
        };
        let mut section = report.section(program, "");
        output.lines().for_each(|line| section.line(line));
        section.end(success);
        report
    }

    const ONE: &str = "   Compiling one v0.1.0
     Running unittests src/lib.rs (target/release/deps/one-01)

running 3 tests
test a ... ok
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.00s
";

    #[test]
    fn results_are_added_up_by_package() {
        let two = "     Running tests/conformance.rs (target/release/deps/conformance-02)
test result: FAILED. 5 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
   Doc-tests one
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
test result: ok. 2 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.00s
error: 1 target failed:
";
        let report = read(&format!("{ONE}{two}"), false);
        assert_eq!(report.closing_line(), "11 passed, 2 failed, 4 skipped");
        assert!(!report.is_green());
        assert_eq!(report.ran(|target| target.package == "one"), 6);
        assert_eq!(report.ran(|target| target.name == "conformance"), 7);
        assert!(report.table().contains("one"));
    }

    #[test]
    fn a_program_that_crashes_is_a_failure() {
        let crash = "     Running tests/conformance.rs (target/release/deps/conformance-02)
test b ... error: test failed, to rerun pass `-p two --test conformance`

Caused by:
  process didn't exit successfully (signal: 11, SIGSEGV: invalid memory reference)
";
        let report = read(&format!("{crash}{ONE}"), false);
        assert_eq!(report.closing_line(), "3 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn a_crash_after_a_result_and_a_green_nothing_are_not_green() {
        assert_eq!(
            read(ONE, false).closing_line(),
            "3 passed, 1 failed, 1 skipped"
        );
        assert!(read(ONE, true).is_green());
        assert!(!read("", true).is_green());
    }

    #[test]
    fn what_a_test_prints_is_not_taken_for_its_program() {
        let nested = "     Running unittests src/lib.rs (target/release/deps/one-01)
     Running tests/inner.rs (elsewhere/inner-09)
test result: FAILED. 0 passed; 9 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
says test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        assert_eq!(
            read(nested, true).closing_line(),
            "2 passed, 0 failed, 0 skipped"
        );
    }
}
