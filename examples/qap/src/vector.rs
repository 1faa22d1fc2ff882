//! Compiles the bounds for the vector units of newer processors and chooses at run time.
#![expect(
    unsafe_code,
    reason = "functions for processor features need a check by the caller"
)]

/// Runs `work` compiled for the best vector unit that the processor has. Code takes part if the
/// compiler inlines it here: `work` and its callees must be `#[inline(always)]`. Results are
/// integers, so they are the same on every processor.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn with_best_vectors<R>(work: impl FnOnce() -> R) -> R {
    if std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("lzcnt")
        && std::arch::is_x86_feature_detected!("popcnt")
    {
        // SAFETY: the processor has all features that the function is compiled for.
        unsafe { with_avx2(work) }
    } else {
        work()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn with_best_vectors<R>(work: impl FnOnce() -> R) -> R {
    work()
}
