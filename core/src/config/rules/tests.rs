//! The table is complete and each rule fires on a job made to break it.

use std::{collections::BTreeSet, fs, path::Path};

use super::*;

/// Words in quotes that look like a rule id.
fn ids_in(source: &str) -> impl Iterator<Item = &str> {
    source
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(|word| is_id(word))
}

fn is_id(word: &str) -> bool {
    word.split_once('-').is_some_and(|(topic, number)| {
        !topic.is_empty()
            && topic
                .bytes()
                .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit())
            && number.len() == 2
            && number.bytes().all(|b| b.is_ascii_digit())
    })
}

fn sources(folder: &Path, texts: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !matches!(name.as_str(), "target" | "tests") {
            sources(&path, texts);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = fs::read_to_string(&path).unwrap();
            texts.push(
                text.split("#[cfg(test)]\nmod tests {")
                    .next()
                    .unwrap()
                    .to_owned(),
            );
        }
    }
}

#[test]
fn ids_are_unique_and_the_handbook_lists_each() {
    let rules: Vec<_> = rule_list().collect();
    let ids: BTreeSet<_> = rules.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids.len(), rules.len(), "an id is used twice");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/manual/rules.md");
    let text = fs::read_to_string(&page).unwrap();
    for (id, what) in &rules {
        let row = format!("| {id} | {what} |");
        assert!(
            text.contains(&row),
            "{} lacks the row\n{row}",
            page.display()
        );
    }
    let listed = text
        .lines()
        .filter_map(|l| l.strip_prefix("| ")?.split(' ').next());
    let listed: Vec<_> = listed.filter(|word| is_id(word)).collect();
    assert_eq!(
        listed.len(),
        listed.iter().collect::<BTreeSet<_>>().len(),
        "a row is there twice"
    );
    let mut texts = Vec::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap() {
        let folder = entry.unwrap().path().join("src");
        let backend = folder.to_string_lossy().contains("/backend-");
        if folder.is_dir() && (backend || folder.to_string_lossy().contains("/core/")) {
            sources(&folder, &mut texts);
        }
    }
    let used: BTreeSet<_> = texts.iter().flat_map(|t| ids_in(t)).collect();
    for (id, _) in &rules {
        assert!(
            used.contains(id),
            "{id} is not in the sources that were found"
        );
    }
    let missing: Vec<_> = used.iter().filter(|id| !listed.contains(id)).collect();
    assert!(missing.is_empty(), "{} lacks {missing:?}", page.display());
}
