//! The suite itself is tested: the oracle with one thing done wrong must fail the case that is meant for it.

use std::{collections::BTreeSet, process::ExitCode, sync::Arc};

use drivetrain_conformance::{
    cases,
    oracle::{Defect, ReferenceBackend},
    suite::{Subject, run_case},
};
use drivetrain_core::engine::Backend;
use libtest_mimic::{Arguments, Failed, Trial};

/// Each defect with the case that is there to find it.
const MUTANTS: [(Defect, &str); 58] = [
    (
        Defect::AttentionCrossesSequences,
        "awkward/dense/scores_do_not_depend_on_neighbours",
    ),
    (Defect::WindowOffByOne, "golden/mistral_swa8/scores"),
    (Defect::PositionsWrapAround, "oracle/dense/scores"),
    (
        Defect::MaskMultiplies,
        "awkward/dense/masked_slots_are_nothing",
    ),
    (Defect::HeadsInterleaved, "golden/llama_gqa_rope3/scores"),
    (Defect::GateAndUpSwapped, "golden/llama_mha/scores"),
    (Defect::RouterNotRenormalised, "golden/mixtral_moe/scores"),
    (Defect::ExpertsRotated, "golden/mixtral_moe/scores"),
    (Defect::SoftmaxTwice, "experts/one_expert_has_all/ranks1"),
    (
        Defect::BalancingGradientDropped,
        "experts/mixtral/sequence/ranks1",
    ),
    (
        Defect::ZLossGradientDropped,
        "experts/mixtral/sequence/ranks1",
    ),
    (
        Defect::RouterLossesReported,
        "experts/losses_stand_beside/ranks1",
    ),
    (
        Defect::RouterLossesPerMicrobatch,
        "experts/few_scored/ranks1",
    ),
    (Defect::BalancedAlone, "experts/mixtral/global/ranks2"),
    (Defect::UnscoredSequencesCount, "experts/few_scored/ranks1"),
    (Defect::IdleExpertsStale, "experts/idle/ranks1"),
    (Defect::BiasIgnored, "experts/mixtral/bias/ranks1"),
    (Defect::BiasWeighsExperts, "experts/mixtral/bias/ranks1"),
    (Defect::BiasUpdatedAlone, "experts/mixtral/bias/ranks2"),
    (
        Defect::BiasNotRestored,
        "checkpoint/mixtral_bias/ranks1/resumes_bit_for_bit",
    ),
    (Defect::FrozenRouterDecays, "experts/mixtral/frozen/ranks1"),
    (
        Defect::EntropyWithoutTemperature,
        "oracle/dense/scores_entropy",
    ),
    (
        Defect::EntropyGradientDropped,
        "oracle/dense/polynomial_entropy",
    ),
    (
        Defect::NormalisedPerMicrobatch,
        "awkward/dense/masked_sequence_adds_nothing",
    ),
    (Defect::GradientsOverwritten, "layouts/dense/ranks1_micro1"),
    (Defect::ReducedTwice, "layouts/dense/ranks2_all"),
    (Defect::AveragedOverRanks, "layouts/dense/ranks2_all"),
    (Defect::NotReduced, "layouts/dense/ranks2_all"),
    (Defect::LossNotReduced, "layouts/dense/ranks2_all"),
    (
        Defect::SkipDecidedAlone,
        "uneven/ranks2/non_finite_gradient_skips_everywhere",
    ),
    (Defect::CountedBeforeCommit, "lost_rank/dense"),
    (
        Defect::SkippedStepCounts,
        "uneven/ranks1/non_finite_gradient_skips_everywhere",
    ),
    (
        Defect::NonFiniteApplied,
        "uneven/ranks1/non_finite_gradient_skips_everywhere",
    ),
    (Defect::ParameterFrozen, "awkward/dense/every_tensor_learns"),
    (
        Defect::ForwardDropsGradients,
        "state/dense/ranks1/forward_changes_nothing",
    ),
    (
        Defect::AbortKeepsGradients,
        "state/dense/ranks1/dropped_steps_leave_nothing",
    ),
    (Defect::ClippedPerTensor, "layouts/dense/ranks1_all"),
    (Defect::NotClipped, "awkward/dense/clips_to_the_limit"),
    (Defect::OneDimDecays, "golden/llama_mha/three_steps"),
    (Defect::DecayInGradient, "golden/llama_mha/three_steps"),
    (Defect::NoBiasCorrection, "golden/llama_mha/three_steps"),
    (Defect::EpsilonUnderRoot, "golden/llama_mha/three_steps"),
    (
        Defect::DivisorIgnored,
        "state/dense/ranks1/deferred_divisor",
    ),
    (
        Defect::ScheduleOneAhead,
        "state/dense/ranks1/schedule_and_override",
    ),
    (
        Defect::MomentsNotRestored,
        "checkpoint/dense/ranks1/resumes_bit_for_bit",
    ),
    (
        Defect::StepNotRestored,
        "checkpoint/dense/ranks1/resumes_bit_for_bit",
    ),
    (Defect::SnapshotFollowsPolicy, "state/dense/ranks1/snapshot"),
    (Defect::TagIgnored, "state/dense/ranks1/imported_snapshot"),
    (
        Defect::ExportRounded,
        "state/dense/ranks1/export_and_import",
    ),
    (
        Defect::ImportSkipsNorms,
        "state/dense/ranks1/export_and_import",
    ),
    (Defect::PeersAdded, "layouts/dense/tp2_all"),
    (Defect::ReplicatedCountedTwice, "layouts/dense/tp2_all"),
    (Defect::TiedCountedTwice, "layouts/tied/pp2_all"),
    (
        Defect::SavedTruncated,
        "saved_activations/long_llama/ranks1",
    ),
    (Defect::SavedChangesLoss, "saved_activations/dense/ranks1"),
    (Defect::LossOnOnePeer, "layouts/dense/cp2_all"),
    (Defect::OutputsOnOnePeer, "uneven/tp2_dp2/seven_evaluated"),
    (Defect::PeerKeepsNorms, "layouts/mixtral/ep2_tp2_all"),
];

fn main() -> ExitCode {
    let mut trials: Vec<_> = MUTANTS.into_iter().map(trial).collect();
    trials.push(Trial::test("mutants/each_defect_once", || {
        let distinct: BTreeSet<_> = MUTANTS.iter().map(|(defect, _)| *defect).collect();
        let all = distinct.len() == MUTANTS.len() && distinct.len() == Defect::ALL.len();
        all.then_some(())
            .ok_or_else(|| Failed::from("a defect is left out or listed twice"))
    }));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn trial((defect, name): (Defect, &'static str)) -> Trial {
    Trial::test(format!("mutants/{defect:?}"), move || {
        let right: Arc<dyn Backend> = Arc::new(ReferenceBackend::replicated());
        let case = cases::all(std::slice::from_ref(&right))
            .into_iter()
            .find(|case| case.name == name)
            .ok_or_else(|| Failed::from(format!("no case is called {name}")))?;
        let subject = Subject::new(ReferenceBackend::replicated());
        if let Some(error) = run_case(&case, &subject).error {
            return Err(Failed::from(format!(
                "the oracle itself fails {name}: {error}"
            )));
        }
        let mutant = subject.other(Arc::new(ReferenceBackend::with_defect(defect)));
        match run_case(&case, &mutant).error {
            Some(_) => Ok(()),
            None => Err(Failed::from(format!("survives {name}"))),
        }
    })
}
