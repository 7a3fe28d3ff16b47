//! The demo's data: arithmetic and short sentences, drawn from a fixed seed.

use anyhow::{Context, Result};
use std::fmt::Write;
use std::path::Path;

/// What the model was trained on: additions, and sentences that count and compare.
pub(super) fn write_pretraining(folder: &Path) -> Result<()> {
    write(
        &folder.join("pretrain.jsonl"),
        12_000,
        1,
        |random| match random.below(4) {
            0 | 1 => addition(random),
            2 => sentence(random),
            _ => comparison(random),
        },
    )
}

/// What the demo teaches it: subtraction.
pub(super) fn write_task(folder: &Path) -> Result<()> {
    write(&folder.join("train.jsonl"), 4_000, 2, subtraction)?;
    write(&folder.join("validation.jsonl"), 128, 3, subtraction)
}

fn addition(random: &mut Random) -> Line {
    let (a, b) = (random.below(100), random.below(100));
    Line::Task(format!("{a}+{b}="), (a + b).to_string())
}

fn subtraction(random: &mut Random) -> Line {
    let (a, b) = (random.below(100), random.below(100));
    let (a, b) = (a.max(b), a.min(b));
    Line::Task(format!("{a}-{b}="), (a - b).to_string())
}

fn comparison(random: &mut Random) -> Line {
    let (a, b) = (random.below(100), random.below(100));
    Line::Task(
        format!("Is {a} more than {b}? "),
        if a > b { "yes" } else { "no" }.to_owned(),
    )
}

fn sentence(random: &mut Random) -> Line {
    let who = random.choose(&["Ada", "Emmy", "Alan", "Grace", "Kurt", "Sofia"]);
    let what = random.choose(&["apples", "books", "stones", "cards", "boats", "lamps"]);
    let (a, b) = (1 + random.below(40), 1 + random.below(40));
    Line::Text(format!(
        "{who} has {a} {what} and finds {b} more. Now {who} has {} {what}.",
        a + b
    ))
}

enum Line {
    Task(String, String),
    Text(String),
}

fn write(
    path: &Path,
    count: usize,
    seed: u64,
    mut line: impl FnMut(&mut Random) -> Line,
) -> Result<()> {
    let mut random = Random(seed);
    let mut text = String::new();
    for _ in 0..count {
        // None of the words has a character that JSON escapes.
        match line(&mut random) {
            Line::Task(prompt, completion) => {
                writeln!(
                    text,
                    r#"{{"prompt": "{prompt}", "completion": "{completion}"}}"#
                )?;
            }
            Line::Text(words) => writeln!(text, r#"{{"text": "{words}"}}"#)?,
        }
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// SplitMix64 (Steele, Lea and Flood 2014): the same data on every machine, for ever.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn choose<'a>(&mut self, among: &[&'a str]) -> &'a str {
        among[self.below(among.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn data_are_the_same_every_time_and_right() {
        let folder = tempfile::tempdir().unwrap();
        super::write_task(folder.path()).unwrap();
        let first = std::fs::read_to_string(folder.path().join("train.jsonl")).unwrap();
        super::write_task(folder.path()).unwrap();
        assert_eq!(
            std::fs::read_to_string(folder.path().join("train.jsonl")).unwrap(),
            first
        );
        assert_eq!(first.lines().count(), 4_000);
        for line in first.lines() {
            let numbers: Vec<u64> = line
                .split(|c: char| !c.is_ascii_digit())
                .filter(|s| !s.is_empty())
                .map(|s| s.parse().unwrap())
                .collect();
            assert_eq!(numbers[0] - numbers[1], numbers[2], "{line}");
        }
    }
}
