//! Which layers each stage holds.

use std::ops::Range;

use crate::{Error, ErrorKind, Result, config::ParallelConfig};

/// Layers of each part of the model: entry `i` is chunk `i / pipeline_parallel_size` of stage
/// `i % pipeline_parallel_size`. Embedding and head go with the first and the last part.
///
/// Stages are even but for the first and the last, if their layers are given; a stage's chunks are even.
///
/// # Errors
/// `Config` where that is not a whole number of layers, above 0, for each chunk of several stages.
pub fn stages(num_layers: usize, parallel: &ParallelConfig) -> Result<Vec<Range<usize>>> {
    let num_stages = parallel.pipeline_parallel_size.max(1);
    let chunks = parallel.virtual_pipeline_size.max(1);
    if num_stages * chunks == 1 {
        return Ok(std::iter::once(0..num_layers).collect());
    }
    let fault = || {
        Error::new(
            ErrorKind::Config,
            "cut_stages",
            "not a whole number of layers, above 0, for each chunk of each stage",
        )
        .with("layers", num_layers)
        .with("stages", num_stages)
        .with("chunks", chunks)
    };
    let (first, last) = match num_stages {
        1 => (None, None),
        _ => (parallel.first_stage_layers, parallel.last_stage_layers),
    };
    let ends: usize = [first, last]
        .iter()
        .flatten()
        .copied()
        .fold(0, usize::saturating_add);
    let middle = num_stages - [first, last].iter().flatten().count();
    let left = num_layers.checked_sub(ends).ok_or_else(fault)?;
    if left % middle.max(1) != 0 || (middle == 0 && left != 0) {
        return Err(fault());
    }
    let layers_of = |stage: usize| match stage {
        0 => first,
        s if s + 1 == num_stages => last,
        _ => None,
    };
    let mut parts = Vec::with_capacity(num_stages * chunks);
    let mut at = 0;
    for stage in (0..chunks).flat_map(|_| 0..num_stages) {
        let layers = layers_of(stage).unwrap_or(left / middle.max(1));
        if layers == 0 || layers % chunks != 0 {
            return Err(fault());
        }
        parts.push(at..at + layers / chunks);
        at += layers / chunks;
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(
        layers: usize,
        stages: usize,
        chunks: usize,
        first: Option<usize>,
        last: Option<usize>,
    ) -> Option<Vec<usize>> {
        let parallel = ParallelConfig {
            pipeline_parallel_size: stages,
            virtual_pipeline_size: chunks,
            first_stage_layers: first,
            last_stage_layers: last,
            ..ParallelConfig::default()
        };
        let parts = super::stages(layers, &parallel).ok()?;
        assert_eq!(parts.len(), stages * chunks);
        let mut at = 0;
        for part in &parts {
            assert_eq!(part.start, at);
            at = part.end;
        }
        assert_eq!(at, layers);
        Some(parts.into_iter().map(|p| p.len()).collect())
    }

    #[test]
    fn even_stages_and_given_ends() {
        assert_eq!(cut(0, 1, 1, None, None), Some(vec![0]));
        assert_eq!(cut(8, 4, 1, None, None), Some(vec![2; 4]));
        assert_eq!(cut(8, 2, 2, None, None), Some(vec![2; 4]));
        assert_eq!(cut(7, 4, 1, Some(1), None), Some(vec![1, 2, 2, 2]));
        assert_eq!(cut(7, 4, 1, None, Some(1)), Some(vec![2, 2, 2, 1]));
        assert_eq!(cut(8, 4, 1, Some(1), Some(1)), Some(vec![1, 3, 3, 1]));
        assert_eq!(cut(5, 2, 1, Some(2), Some(3)), Some(vec![2, 3]));
        // The first stage's 2 layers are one for each of its chunks.
        assert_eq!(cut(10, 3, 2, Some(2), None), Some(vec![1, 2, 2, 1, 2, 2]));
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        assert_eq!(cut(7, 4, 1, None, None), None);
        assert_eq!(cut(2, 4, 1, None, None), None);
        assert_eq!(cut(0, 2, 1, None, None), None);
        assert_eq!(cut(8, 2, 3, None, None), None);
        assert_eq!(cut(9, 2, 1, Some(9), None), None);
        assert_eq!(cut(9, 2, 1, Some(0), None), None);
        assert_eq!(cut(9, 2, 1, Some(usize::MAX), Some(usize::MAX)), None);
        assert_eq!(cut(9, 2, 1, Some(4), Some(4)), None);
        assert_eq!(cut(9, 3, 2, Some(3), Some(2)), None);
    }
}
