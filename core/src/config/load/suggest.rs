//! The valid key that an unknown one probably meant.

use super::tree::Path;

/// Names that other programs use for our keys.
const FOREIGN: [(&str, &str); 20] = [
    ("lr", "optimizer.learning_rate"),
    ("adam_beta1", "optimizer.beta1"),
    ("adam_beta2", "optimizer.beta2"),
    ("eps", "optimizer.epsilon"),
    ("adam_eps", "optimizer.epsilon"),
    ("clip_grad", "optimizer.max_grad_norm"),
    ("gradient_clipping", "optimizer.max_grad_norm"),
    ("tp", "parallel.tensor_parallel_size"),
    ("pp", "parallel.pipeline_parallel_size"),
    ("cp", "parallel.context_parallel_size"),
    ("ep", "parallel.expert_parallel_size"),
    ("dp", "parallel.data_parallel_size"),
    (
        "tensor_model_parallel_size",
        "parallel.tensor_parallel_size",
    ),
    (
        "pipeline_model_parallel_size",
        "parallel.pipeline_parallel_size",
    ),
    ("per_device_train_batch_size", "batch.micro_batch_size"),
    ("train_batch_size", "batch.global_batch_size"),
    ("max_steps", "steps"),
    ("output_dir", "output"),
    ("num_warmup_steps", "schedule.warmup_steps"),
    ("max_seq_length", "data.max_length"),
];

/// Similarity from which a name is taken for a slip of another.
const NEAR: f64 = 0.8;

/// The key that `unknown`, written at `level`, probably meant.
pub(super) fn key(unknown: &str, level: &Path, valid: &[Path]) -> Option<Path> {
    let name = normal(unknown);
    let leaf = |path: &Path| normal(path.0.last().map_or("", String::as_str));
    let here = |path: &&Path| path.0.len() == level.0.len() + 1 && path.0.starts_with(&level.0);
    let best = |candidates: &mut dyn Iterator<Item = &Path>| {
        let scored = candidates.map(|path| (similarity(&name, &leaf(path)), path));
        scored
            .filter(|(score, _)| *score >= NEAR)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, path)| path.clone())
    };
    let exact = || valid.iter().find(|p| leaf(p) == name && here(p));
    let elsewhere = || valid.iter().find(|p| leaf(p) == name);
    let foreign = || {
        let path = FOREIGN
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, p)| Path::parse(p))?;
        valid.contains(&path).then_some(path)
    };
    exact()
        .or_else(elsewhere)
        .cloned()
        .or_else(foreign)
        .or_else(|| best(&mut valid.iter().filter(here)))
        .or_else(|| best(&mut valid.iter()))
}

/// The nearest of some words, if any is near.
pub(super) fn word<'a>(unknown: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = normal(unknown);
    let scored = valid
        .into_iter()
        .map(|v| (similarity(&name, &normal(v)), v));
    scored
        .filter(|(score, _)| *score >= 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, v)| v)
}

fn normal(name: &str) -> String {
    name.trim().to_lowercase().replace(['-', ' '], "_")
}

/// 0 to 1; a name that lacks or adds whole words at its end is near.
fn similarity(a: &str, b: &str) -> f64 {
    let extends = |long: &str, short: &str| {
        short.len() >= 3
            && long
                .strip_prefix(short)
                .is_some_and(|rest| rest.starts_with('_'))
    };
    if extends(a, b) || extends(b, a) {
        return 0.95;
    }
    strsim::normalized_damerau_levenshtein(a, b).max(if a.len() > 4 {
        strsim::jaro_winkler(a, b) - 0.08
    } else {
        0.0
    })
}
