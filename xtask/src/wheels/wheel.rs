//! Reads a wheel and unpacks part of it, comparing every file with the wheel's `RECORD`.

use super::record::{Record, copy_hashed};
use crate::progress::Progress;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use zip::ZipArchive;

/// An open wheel: a zip archive with `METADATA` and `RECORD` in its `.dist-info` folder.
#[derive(Debug)]
pub(crate) struct Wheel {
    archive: ZipArchive<File>,
    path: PathBuf,
    members: Vec<String>,
    pub(crate) metadata: String,
    record: Record,
}

impl Wheel {
    pub(crate) fn open(path: &Path) -> Result<Wheel> {
        let name = || format!("wheel {}", path.display());
        let mut archive =
            ZipArchive::new(File::open(path).with_context(name)?).with_context(name)?;
        let members: Vec<String> = archive
            .file_names()
            .map(|member| Ok(member?.into_owned()))
            .collect::<Result<_>>()
            .with_context(name)?;
        let mut text_of = |file: &str| -> Result<String> {
            let suffix = format!(".dist-info/{file}");
            let is_it =
                |member: &&String| member.ends_with(&suffix) && member.matches('/').count() == 1;
            let member = members.iter().find(is_it);
            let member = member.with_context(|| format!("{} has no {file}", name()))?;
            let mut text = String::new();
            archive
                .by_name(member)?
                .read_to_string(&mut text)
                .with_context(name)?;
            Ok(text)
        };
        let metadata = text_of("METADATA")?;
        let record = Record::parse(&text_of("RECORD")?).with_context(|| name() + ": RECORD")?;
        Ok(Wheel {
            archive,
            path: path.to_path_buf(),
            members,
            metadata,
            record,
        })
    }

    /// Unpacks each file for which `place` gives a path under `folder`, comparing it with `RECORD`.
    pub(crate) fn unpack(
        &mut self,
        folder: &Path,
        place: impl Fn(&str) -> Option<String>,
        manifest: &mut Record,
    ) -> Result<()> {
        let members: Vec<(String, String)> = self
            .members
            .iter()
            .filter(|member| !member.ends_with('/') && !member.split('/').any(|part| part == ".."))
            .filter_map(|member| Some((member.clone(), place(member)?)))
            .collect();
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let progress = Progress::bytes(&format!("unpack {name}"));
        let sizes = members
            .iter()
            .filter_map(|(member, _)| self.record.0.get(member));
        progress.set_total(sizes.map(|entry| entry.size).sum());
        let mut done = 0;
        for (member, place) in members {
            let expected = self.record.0.get(&member);
            let expected = expected.with_context(|| format!("{name}: RECORD lacks {member}"))?;
            let target = folder.join(&place);
            fs::create_dir_all(target.parent().unwrap_or(folder))?;
            let mut file = File::create(&target)?;
            let found = copy_hashed(&mut self.archive.by_name(&member)?, &mut file)
                .with_context(|| format!("{name}: {member}"))?;
            ensure!(
                found == *expected,
                "{name}: {member} differs from the wheel's RECORD (found {} bytes, expected {})",
                found.size,
                expected.size
            );
            if found.size > 1 << 20 {
                file.sync_all()?; // headers are left to the size check
            }
            done += found.size;
            progress.set(done);
            manifest.0.insert(place, found);
        }
        progress.finish(done);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use zip::{ZipWriter, write::SimpleFileOptions};

    /// A wheel with the file `p/a.h` that holds `content`, whose RECORD is of "hello".
    fn wheel(folder: &Path, content: &str) -> PathBuf {
        let hello = copy_hashed(&mut &b"hello"[..], &mut std::io::sink()).unwrap();
        let record =
            Record([("p/a.h".to_owned(), hello)].into()).to_text() + "p-1.dist-info/RECORD,,\n";
        let path = folder.join("p-1-py3-none-any.whl");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        let members = [
            ("p/a.h", content),
            ("p/skipped", "x"),
            ("p-1.dist-info/METADATA", "Requires-Dist: q==2\n"),
            ("p-1.dist-info/RECORD", &record),
        ];
        for (name, text) in members {
            zip.start_file(name, SimpleFileOptions::default()).unwrap();
            zip.write_all(text.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    fn unpack(path: &Path, folder: &Path) -> Result<Record> {
        let mut manifest = Record::default();
        let place = |path: &str| (path == "p/a.h").then(|| "include/a.h".to_owned());
        Wheel::open(path)?.unpack(folder, place, &mut manifest)?;
        Ok(manifest)
    }

    #[test]
    fn the_wanted_files_are_unpacked_and_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = unpack(&wheel(folder.path(), "hello"), folder.path()).unwrap();
        assert_eq!(manifest.0.keys().collect::<Vec<_>>(), ["include/a.h"]);
        assert_eq!(
            fs::read_to_string(folder.path().join("include/a.h")).unwrap(),
            "hello"
        );
        assert!(!folder.path().join("p/skipped").exists());
        manifest.check(folder.path(), true).unwrap();
    }

    #[test]
    fn a_file_that_differs_from_the_record_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = unpack(&wheel(folder.path(), "hallo"), folder.path()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("p/a.h differs from the wheel's RECORD"),
            "{error}"
        );
    }

    #[test]
    fn a_cut_wheel_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = wheel(folder.path(), "hello");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 30]).unwrap();
        let error = Wheel::open(&path).unwrap_err();
        assert!(
            error.to_string().contains("p-1-py3-none-any.whl"),
            "{error}"
        );
    }
}
