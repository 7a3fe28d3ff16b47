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
}

impl Defect {
    /// All of them.
    pub const ALL: [Self; 36] = [
        Self::AttentionCrossesSequences,
        Self::PositionsWrapAround,
        Self::WindowOffByOne,
        Self::HeadsInterleaved,
        Self::GateAndUpSwapped,
        Self::RouterNotRenormalised,
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
    ];
}
