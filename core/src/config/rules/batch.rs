//! Batch arithmetic. Shares need not be even: the micro-batch planner is exact for any split.

use super::Rule;

const SIZES: &[&str] = &[
    "batch.global_batch_size",
    "batch.micro_batch_size",
    "parallel.data_parallel_size",
];

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "BATCH-01",
        what: "fewer sequences a step than data-parallel ranks",
        reads: SIZES,
        check: |facts, faults| {
            let (global, ranks) = (facts.config.batch.global_batch_size, facts.data_ranks());
            if global < ranks {
                faults.error(
                    "batch.global_batch_size",
                    format!(
                        "{global} sequences a step over {ranks} data-parallel ranks: {} ranks would never work",
                        ranks - global
                    ),
                    format!("give at least {ranks}, or set parallel.data_parallel_size: {global}"),
                );
            }
        },
    },
    Rule {
        id: "BATCH-02",
        what: "a micro-batch larger than a rank's share of the step",
        reads: SIZES,
        check: |facts, faults| {
            let (global, ranks) = (facts.config.batch.global_batch_size, facts.data_ranks());
            let Some(micro) = facts.config.batch.micro_batch_size else {
                return;
            };
            let share = global.div_ceil(ranks);
            if global >= ranks && micro > share {
                faults.error(
                    "batch.micro_batch_size",
                    format!(
                        "{micro} sequences a micro-batch, but a rank's share is {share} (global_batch_size {global} over {ranks} data-parallel ranks)"
                    ),
                    format!("give {share} or less, or global_batch_size {} or more", micro.saturating_mul(ranks)),
                );
            }
        },
    },
    Rule {
        id: "BATCH-03",
        what: "micro-batches limited by sequences and by tokens at once",
        reads: &["batch.micro_batch_size", "batch.micro_batch_tokens"],
        check: |facts, faults| {
            let batch = &facts.config.batch;
            if let (Some(size), Some(tokens)) = (batch.micro_batch_size, batch.micro_batch_tokens) {
                faults.error(
                    "batch.micro_batch_tokens",
                    format!("micro_batch_tokens {tokens} beside micro_batch_size {size}"),
                    "keep one of them",
                );
            }
        },
    },
    Rule {
        id: "BATCH-04",
        what: "a micro-batch's tokens hold no sequence of the longest length (warning)",
        reads: &["batch.micro_batch_tokens", "data.max_length"],
        check: |facts, faults| {
            let longest = facts
                .config
                .data
                .max_length
                .or(facts.model.map(|m| m.max_position_embeddings));
            if let (Some(tokens), Some(longest)) = (facts.config.batch.micro_batch_tokens, longest)
                && tokens < longest
            {
                faults.warning(
                    "batch.micro_batch_tokens",
                    format!(
                        "{tokens} tokens a micro-batch, but a sequence may have {longest}: a longer one is a micro-batch of its own"
                    ),
                    format!("give {longest} or more, or set data.max_length: {tokens}"),
                );
            }
        },
    },
    Rule {
        id: "BATCH-05",
        what: "data-parallel ranks with unequal shares (warning)",
        reads: SIZES,
        check: |facts, faults| {
            let (global, ranks) = (facts.config.batch.global_batch_size, facts.data_ranks());
            if global > ranks && !global.is_multiple_of(ranks) {
                let below = global / ranks * ranks;
                faults.warning(
                    "batch.global_batch_size",
                    format!(
                        "{global} sequences over {ranks} data-parallel ranks: {} ranks get one more and the others wait (the result is exact)",
                        global % ranks
                    ),
                    format!("{below} or {} split evenly", below + ranks),
                );
            }
        },
    },
];
