//! A wheel's `RECORD`: path, sha256 and size of each file. Our manifest has the same format.

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// Size and digest of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) sha256: [u8; 32],
    pub(crate) size: u64,
}

/// The files of a wheel or of an installation, by their `/`-separated path.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Record(pub(crate) BTreeMap<String, Entry>);

impl Record {
    pub(crate) fn parse(text: &str) -> Result<Record> {
        let mut files = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            // From the right: a quoted path may hold commas.
            let mut fields = line.rsplitn(3, ',');
            let (size, hash, path) = (fields.next(), fields.next(), fields.next());
            let (Some(size), Some(hash), Some(path)) = (size, hash, path) else {
                bail!(
                    "line {}: found {line:?}, expected path,hash,size",
                    index + 1
                );
            };
            if hash.is_empty() {
                continue; // RECORD itself and signatures
            }
            let entry = parse_entry(hash, size).with_context(|| format!("line {}", index + 1))?;
            files.insert(path.trim_matches('"').to_owned(), entry);
        }
        Ok(Record(files))
    }

    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        for (path, entry) in &self.0 {
            let hash = URL_SAFE_NO_PAD.encode(entry.sha256);
            writeln!(text, "{path},sha256={hash},{}", entry.size).expect("writing to a String");
        }
        text
    }

    /// Compares what lies under `folder` with this record: sizes, and digests too if `hash`.
    pub(crate) fn check(&self, folder: &Path, hash: bool) -> Result<()> {
        for (path, expected) in &self.0 {
            let file = folder.join(path);
            let metadata = file
                .metadata()
                .with_context(|| format!("{} is missing", file.display()))?;
            let found = metadata.len();
            ensure!(
                found == expected.size,
                "{} is damaged: found {found} bytes, expected {}",
                file.display(),
                expected.size
            );
            if hash {
                let found = copy_hashed(&mut File::open(&file)?, &mut std::io::sink())?;
                ensure!(
                    found == *expected,
                    "{} is damaged: its sha256 differs",
                    file.display()
                );
            }
        }
        Ok(())
    }
}

fn parse_entry(hash: &str, size: &str) -> Result<Entry> {
    let digest = hash
        .strip_prefix("sha256=")
        .with_context(|| format!("found {hash}"))?;
    let bytes = URL_SAFE_NO_PAD
        .decode(digest)
        .with_context(|| format!("found {hash}"))?;
    let sha256 = bytes
        .try_into()
        .ok()
        .with_context(|| format!("{hash} is not 32 bytes"))?;
    Ok(Entry {
        sha256,
        size: size
            .parse()
            .with_context(|| format!("found size {size:?}"))?,
    })
}

/// Copies all of `from` and says what it was.
pub(crate) fn copy_hashed(from: &mut impl Read, to: &mut impl Write) -> Result<Entry> {
    let (mut digest, mut size) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(Entry {
                sha256: digest.finalize().into(),
                size,
            });
        }
        digest.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
        size += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(folder: &Path) -> Record {
        std::fs::write(folder.join("a"), b"hello").unwrap();
        let entry = copy_hashed(&mut &b"hello"[..], &mut std::io::sink()).unwrap();
        Record(BTreeMap::from([("a".to_owned(), entry)]))
    }

    #[test]
    fn text_and_back() {
        // The digest of "hello", computed with sha256sum.
        let text = "a,sha256=LPJNul-wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ,5\n";
        let folder = tempfile::tempdir().unwrap();
        let record = sample(folder.path());
        assert_eq!(record.to_text(), text);
        assert_eq!(
            Record::parse(&format!("{text}x/RECORD,,\n")).unwrap(),
            record
        );
    }

    #[test]
    fn a_flipped_byte_is_found_by_hashing_and_a_cut_by_the_size() {
        let folder = tempfile::tempdir().unwrap();
        let record = sample(folder.path());
        record.check(folder.path(), true).unwrap();
        std::fs::write(folder.path().join("a"), b"hallo").unwrap();
        let message = record.check(folder.path(), true).unwrap_err().to_string();
        assert!(message.contains("sha256 differs"), "{message}");
        std::fs::write(folder.path().join("a"), b"hell").unwrap();
        let message = record.check(folder.path(), false).unwrap_err().to_string();
        assert!(message.contains("found 4 bytes, expected 5"), "{message}");
        std::fs::remove_file(folder.path().join("a")).unwrap();
        assert!(record.check(folder.path(), false).is_err());
    }

    #[test]
    fn malformed_lines_are_errors_that_name_the_line() {
        for bad in ["a", "a,sha256=xyz,5", "a,md5=AAAA,5", "a,sha256=AAAA,5"] {
            let message = format!("{:#}", Record::parse(&format!("q,,\n{bad}")).unwrap_err());
            assert!(message.starts_with("line 2"), "{message}");
        }
    }
}
