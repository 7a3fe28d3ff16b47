//! Pipeline schedules as data: a list of actions a rank.

use serde::{Deserialize, Serialize};

/// One action of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineAction {
    /// Forward of a micro-batch through a chunk.
    Forward {
        /// Which micro-batch.
        microbatch: usize,
        /// Which of the stage's chunks.
        chunk: usize,
    },
    /// Backward of a micro-batch through a chunk.
    Backward {
        /// Which micro-batch.
        microbatch: usize,
        /// Which of the stage's chunks.
        chunk: usize,
    },
}

/// What one stage does in a step, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineSchedule {
    /// The actions.
    pub actions: Vec<PipelineAction>,
}

impl PipelineSchedule {
    /// Forward then backward, micro-batch by micro-batch: a pipeline of one stage.
    pub fn sequential(num_microbatches: usize) -> Self {
        let actions = (0..num_microbatches)
            .flat_map(|microbatch| {
                [
                    PipelineAction::Forward {
                        microbatch,
                        chunk: 0,
                    },
                    PipelineAction::Backward {
                        microbatch,
                        chunk: 0,
                    },
                ]
            })
            .collect();
        Self { actions }
    }

    /// One-forward-one-backward (Narayanan et al. 2021) for `stage` of `num_stages`.
    pub fn one_forward_one_backward(
        stage: usize,
        num_stages: usize,
        num_microbatches: usize,
    ) -> Self {
        let warmup = (num_stages - 1 - stage).min(num_microbatches);
        let forward = |microbatch| PipelineAction::Forward {
            microbatch,
            chunk: 0,
        };
        let backward = |microbatch| PipelineAction::Backward {
            microbatch,
            chunk: 0,
        };
        let mut actions: Vec<_> = (0..warmup).map(forward).collect();
        for i in warmup..num_microbatches {
            actions.extend([forward(i), backward(i - warmup)]);
        }
        actions.extend((num_microbatches - warmup..num_microbatches).map(backward));
        Self { actions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_stage_alternates_and_first_warms_up() {
        let last = PipelineSchedule::one_forward_one_backward(3, 4, 6);
        assert_eq!(last, PipelineSchedule::sequential(6));
        let first = PipelineSchedule::one_forward_one_backward(0, 4, 6);
        let warmup = first
            .actions
            .iter()
            .take_while(|a| matches!(a, PipelineAction::Forward { .. }))
            .count();
        assert_eq!(warmup, 4);
    }

    #[test]
    fn each_micro_batch_goes_forward_once_and_then_backward_once_with_few_open() {
        for (stages, microbatches) in [(1, 3), (4, 6), (4, 2), (3, 3), (2, 0)] {
            for stage in 0..stages {
                let schedule =
                    PipelineSchedule::one_forward_one_backward(stage, stages, microbatches);
                let (mut forward, mut backward) = (0, 0);
                for action in schedule.actions {
                    match action {
                        PipelineAction::Forward { microbatch, .. } => {
                            assert_eq!(microbatch, forward);
                            forward += 1;
                        }
                        PipelineAction::Backward { microbatch, .. } => {
                            assert_eq!(microbatch, backward);
                            backward += 1;
                        }
                    }
                    assert!((backward..=backward + stages - stage).contains(&forward));
                }
                assert_eq!((forward, backward), (microbatches, microbatches));
            }
        }
    }
}
