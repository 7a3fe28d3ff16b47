//! Faults that can be put into the oracle, one at a time, to test the suite that should find them.

/// One thing done wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Defect {
    /// Attention treats the packed batch as one sequence.
    AttentionCrossesSequences,
    /// Positions wrap around at the first sequence's length. (That they do not restart at all changes nothing:
    /// RoPE sees only differences within a sequence.)
    PositionsWrapAround,
    /// The sliding window sees one key too many.
    WindowOffByOne,
    /// Query head h uses key/value head `h % K` instead of `h / (H / K)`.
    HeadsInterleaved,
    /// SwiGLU activates `up` instead of `gate`.
    GateAndUpSwapped,
    /// The chosen experts' weights do not sum to 1.
    RouterNotRenormalised,
    /// Each expert computes with the next one's weights.
    ExpertsRotated,
    /// The load-balancing loss takes the softmax of the softmax.
    SoftmaxTwice,
    /// The load-balancing loss is reported, and its gradient dropped.
    BalancingGradientDropped,
    /// The z-loss is reported, and its gradient dropped.
    ZLossGradientDropped,
    /// The router's losses are added to the reported loss.
    RouterLossesReported,
    /// The router's losses are divided by the micro-batch's own sequences.
    RouterLossesPerMicrobatch,
    /// The load of a micro-batch is balanced on each rank by itself.
    BalancedAlone,
    /// Sequences without a scored token count in the router's losses.
    UnscoredSequencesCount,
    /// The gradient of an expert without tokens is that of the step before.
    IdleExpertsStale,
    /// Experts are chosen without their selection bias.
    BiasIgnored,
    /// Experts are weighted by softmax and selection bias.
    BiasWeighsExperts,
    /// Each rank moves the selection bias by its own tokens.
    BiasUpdatedAlone,
    /// Resuming leaves the selection bias at 0.
    BiasNotRestored,
    /// A frozen router decays.
    FrozenRouterDecays,
    /// Temperature scales log-probs but not entropy.
    EntropyWithoutTemperature,
    /// The derivative of entropy is dropped.
    EntropyGradientDropped,
    /// The loss is taken at every token, and its derivatives are multiplied by the mask.
    MaskMultiplies,
    /// Each micro-batch is divided by its own scored tokens, and then by their number.
    NormalisedPerMicrobatch,
    /// A micro-batch's gradients replace those before it.
    GradientsOverwritten,
    /// Gradients are summed over data-parallel ranks twice.
    ReducedTwice,
    /// Gradients are averaged over data-parallel ranks, though the totals are global.
    AveragedOverRanks,
    /// Gradients are not summed over data-parallel ranks.
    NotReduced,
    /// The reported loss is this rank's own.
    LossNotReduced,
    /// Each rank looks at its own gradients only to decide on skipping.
    SkipDecidedAlone,
    /// The step is counted before it commits.
    CountedBeforeCommit,
    /// A skipped step counts.
    SkippedStepCounts,
    /// A non-finite gradient is applied.
    NonFiniteApplied,
    /// One parameter's gradient is always 0.
    ParameterFrozen,
    /// A forward pass between steps drops the accumulated gradients.
    ForwardDropsGradients,
    /// `abort` keeps the accumulated gradients.
    AbortKeepsGradients,
    /// Clipping is by each tensor's own norm.
    ClippedPerTensor,
    /// Clipping is left out.
    NotClipped,
    /// 1-D parameters decay.
    OneDimDecays,
    /// Weight decay is added to the gradient.
    DecayInGradient,
    /// Moments are not corrected for their start at 0.
    NoBiasCorrection,
    /// Epsilon is added under the root.
    EpsilonUnderRoot,
    /// The deferred divisor is ignored.
    DivisorIgnored,
    /// The schedule is one step ahead.
    ScheduleOneAhead,
    /// Resuming leaves the moments at 0.
    MomentsNotRestored,
    /// Resuming leaves the step count at 0.
    StepNotRestored,
    /// A snapshot follows the policy.
    SnapshotFollowsPolicy,
    /// A forward pass with a tag uses the policy.
    TagIgnored,
    /// Export rounds to bf16.
    ExportRounded,
    /// Import leaves the norms as they are.
    ImportSkipsNorms,
    /// Gradients are summed over model-parallel peers too.
    PeersAdded,
    /// The norm counts what tensor-parallel ranks hold alike once on each of two.
    ReplicatedCountedTwice,
    /// The norm counts a tied embedding on the first stage and on the next.
    TiedCountedTwice,
    /// Activations that are saved in bf16 are cut off and not rounded.
    SavedTruncated,
    /// The dtype of saved activations is seen in the loss.
    SavedChangesLoss,
    /// Only one of the model-parallel peers reports the loss.
    LossOnOnePeer,
    /// Only one of the model-parallel peers has the outputs.
    OutputsOnOnePeer,
    /// Model-parallel peers but the first do not update the norms.
    PeerKeepsNorms,
}

impl Defect {
    /// All of them.
    pub const ALL: [Self; 58] = [
        Self::AttentionCrossesSequences,
        Self::PositionsWrapAround,
        Self::WindowOffByOne,
        Self::HeadsInterleaved,
        Self::GateAndUpSwapped,
        Self::RouterNotRenormalised,
        Self::ExpertsRotated,
        Self::SoftmaxTwice,
        Self::BalancingGradientDropped,
        Self::ZLossGradientDropped,
        Self::RouterLossesReported,
        Self::RouterLossesPerMicrobatch,
        Self::BalancedAlone,
        Self::UnscoredSequencesCount,
        Self::IdleExpertsStale,
        Self::BiasIgnored,
        Self::BiasWeighsExperts,
        Self::BiasUpdatedAlone,
        Self::BiasNotRestored,
        Self::FrozenRouterDecays,
        Self::EntropyWithoutTemperature,
        Self::EntropyGradientDropped,
        Self::MaskMultiplies,
        Self::NormalisedPerMicrobatch,
        Self::GradientsOverwritten,
        Self::ReducedTwice,
        Self::AveragedOverRanks,
        Self::NotReduced,
        Self::LossNotReduced,
        Self::SkipDecidedAlone,
        Self::CountedBeforeCommit,
        Self::SkippedStepCounts,
        Self::NonFiniteApplied,
        Self::ParameterFrozen,
        Self::ForwardDropsGradients,
        Self::AbortKeepsGradients,
        Self::ClippedPerTensor,
        Self::NotClipped,
        Self::OneDimDecays,
        Self::DecayInGradient,
        Self::NoBiasCorrection,
        Self::EpsilonUnderRoot,
        Self::DivisorIgnored,
        Self::ScheduleOneAhead,
        Self::MomentsNotRestored,
        Self::StepNotRestored,
        Self::SnapshotFollowsPolicy,
        Self::TagIgnored,
        Self::ExportRounded,
        Self::ImportSkipsNorms,
        Self::PeersAdded,
        Self::ReplicatedCountedTwice,
        Self::TiedCountedTwice,
        Self::SavedTruncated,
        Self::SavedChangesLoss,
        Self::LossOnOnePeer,
        Self::OutputsOnOnePeer,
        Self::PeerKeepsNorms,
    ];
}
