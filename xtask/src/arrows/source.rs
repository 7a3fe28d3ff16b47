//! What the text of tracked files may not contain.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

const MAX_LINES: usize = 600;
const SOURCE: [&str; 11] = [
    "rs", "cc", "hpp", "cpp", "cu", "cuh", "h", "py", "sh", "md", "toml",
];
/// The contract names no implementor (comments may).
const NOT_IN_CORE: [&str; 4] = ["fsdp", "megatron", "libtorch", "cudarc"];
/// Folders of somebody's machine. Written in parts, or this file would be its own violation.
const MACHINE_PATHS: [&str; 3] = [
    concat!("/", "work"),
    concat!("/", "root"),
    concat!("/", "tmp"),
];

/// A tracked text file.
#[derive(Debug)]
pub(super) struct TextFile {
    path: String,
    text: String,
}

pub(super) fn tracked_files(root: &Path) -> Result<Vec<TextFile>> {
    // A checkout may belong to another user than the one who checks it (a container's root).
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .current_dir(root)
        .output()
        .context("git cannot be started")?;
    ensure!(
        output.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let names = String::from_utf8(output.stdout).context("a tracked file's name is not UTF-8")?;
    let mut files = Vec::new();
    for path in names.split('\0').filter(|path| !path.is_empty()) {
        let file = root.join(path);
        // Links, files that are deleted but not yet committed so, and binary files have no text.
        if file
            .symlink_metadata()
            .is_ok_and(|metadata| metadata.is_file())
            && let Ok(text) = String::from_utf8(std::fs::read(&file)?)
        {
            files.push(TextFile {
                path: path.to_owned(),
                text,
            });
        }
    }
    Ok(files)
}

pub(super) fn violations(files: &[TextFile]) -> Vec<String> {
    let mut found = Vec::new();
    for file in files {
        let extension = file.path.rsplit('.').next().unwrap_or_default();
        let lines = file.text.lines().count();
        if SOURCE.contains(&extension) && lines > MAX_LINES {
            found.push(format!(
                "{}: {lines} lines, at most {MAX_LINES} are allowed",
                file.path
            ));
        }
        for (number, line) in (1..).zip(file.text.lines()) {
            for path in MACHINE_PATHS.iter().filter(|path| has_path(line, path)) {
                found.push(format!(
                    "{}:{number}: a path of one machine ({path})",
                    file.path
                ));
            }
        }
        if file.path.starts_with("core/") && extension == "rs" {
            let code = without_comments(&file.text).to_lowercase();
            for (number, line) in (1..).zip(code.lines()) {
                for name in NOT_IN_CORE.iter().filter(|name| line.contains(**name)) {
                    found.push(format!("{}:{number}: core names {name}", file.path));
                }
            }
        }
        if file.path == "core/src/lib.rs" && !file.text.contains("#![forbid(unsafe_code)]") {
            found.push(format!("{}: lacks #![forbid(unsafe_code)]", file.path));
        }
    }
    found
}

/// Whether `line` has this path, or one below it, as an absolute path of its own.
fn has_path(line: &str, path: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
    line.match_indices(path).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + path.len()..].chars().next();
        // `}`, `)` and `$` end a variable: "$ROOT/tmp" is not a path of one machine.
        let part_of_longer = |c: char| is_word(c) || "/})>*".contains(c);
        !before.is_some_and(part_of_longer) && !after.is_some_and(|c| is_word(c) && c != '.')
    })
}

/// Rust source with comments blanked out; strings stay, line numbers too.
fn without_comments(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let (length, is_comment) = token(rest);
        let text = &rest[..length.max(c.len_utf8())];
        if is_comment {
            code.extend(text.chars().filter(|c| *c == '\n'));
        } else {
            code.push_str(text);
        }
        rest = &rest[text.len()..];
    }
    code
}

/// Length of the comment, string, or single character that `rest` starts with.
fn token(rest: &str) -> (usize, bool) {
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), true);
    }
    if rest.starts_with("/*") {
        return (block_comment(rest), true);
    }
    if let Some(length) = raw_string(rest) {
        return (length, false);
    }
    if let Some(body) = rest.strip_prefix('"') {
        let mut escaped = false;
        let end = body.find(|c| {
            let is_end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            is_end
        });
        return (end.map_or(rest.len(), |end| end + 2), false);
    }
    // A quote as a character must not open a string.
    for quote in ["'\"'", "'\\\"'"] {
        if rest.starts_with(quote) {
            return (quote.len(), false);
        }
    }
    (0, false)
}

/// Block comments nest.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest[at..].starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Length of `r"..."` or `r#"..."#`, if `rest` starts with one.
fn raw_string(rest: &str) -> Option<usize> {
    let after_r = rest.strip_prefix('r')?;
    let body = after_r.trim_start_matches('#');
    let hashes = after_r.len() - body.len();
    let body = body.strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = body.find(&end).map_or(body.len(), |at| at + end.len());
    Some(rest.len() - body.len() + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, text: &str) -> Vec<String> {
        violations(&[TextFile {
            path: path.to_owned(),
            text: text.to_owned(),
        }])
    }

    #[test]
    fn core_may_name_an_engine_in_a_comment_only() {
        let fine = "//! fsdp shards\n/* megatron /* libtorch */ fsdp */ fn f() {} // cudarc\n";
        assert_eq!(check("core/src/a.rs", fine), [""; 0]);
        assert_eq!(
            check("backend-fsdp/src/a.rs", "const NAME: &str = \"fsdp\";"),
            [""; 0]
        );
        let string = "let url = \"http://a\"; // megatron\nlet c = '\"'; let s = \"x // FSDP\";\n";
        assert_eq!(
            check("core/src/a.rs", string),
            ["core/src/a.rs:2: core names fsdp"]
        );
        let raw = "let a = r#\"\"//\"#; enum E { Megatron }";
        assert_eq!(
            check("core/src/a.rs", raw),
            ["core/src/a.rs:1: core names megatron"]
        );
        let escaped = "let a = \"\\\"//\"; use cudarc::x;";
        assert_eq!(
            check("core/src/a.rs", escaped),
            ["core/src/a.rs:1: core names cudarc"]
        );
    }

    #[test]
    fn core_forbids_unsafe() {
        assert_eq!(
            check("core/src/lib.rs", "#![forbid(unsafe_code)]\n"),
            [""; 0]
        );
        assert_eq!(check("core/src/lib.rs", "//! core\n").len(), 1);
    }

    #[test]
    fn machine_paths_are_found_and_nothing_else() {
        let machine = |folder: &str| format!("a {}{folder} b", '/');
        for folder in ["work/main", "root/.cargo", "tmp", "work", "tmp/x"] {
            assert_eq!(check("a.md", &machine(folder)).len(), 1, "{folder}");
        }
        for fine in [
            "framework/workspace",
            "../work/x",
            "$OUT/tmp/x",
            "${A}/root",
            "a/tmp",
        ] {
            assert_eq!(check("a.md", fine), [""; 0], "{fine}");
        }
        assert_eq!(check("a.md", &machine("workspace")), [""; 0]);
    }

    #[test]
    fn a_long_source_file_is_found() {
        assert_eq!(check("a.rs", &"x\n".repeat(600)), [""; 0]);
        assert_eq!(check("a.rs", &"x\n".repeat(601)).len(), 1);
        assert_eq!(check("data.jsonl", &"x\n".repeat(601)), [""; 0]);
    }
}
