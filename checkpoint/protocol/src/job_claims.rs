//! Claims of jobs: which virtual machine runs a job whose checkpoints are in a store.
//!
//! The store has one claim for each job. A virtual machine that runs the job renews it. Another one
//! that restarts the job takes the claim over with a higher term, and only if the job cannot run in
//! the first one any more, or if the user insists after [`CLAIM_VALIDITY`]. A virtual machine that
//! finds a higher term than its own ends its copy of the job.
//!
//! The clocks of two hosts may differ. Therefore a claim contains no time that another host
//! compares: an observer measures with its own clock for how long it has seen a claim unchanged.

use sempa_proto::Micros;
use sempa_proto::checkpoint::{ClaimKey, JobClaim};
use std::collections::BTreeMap;

/// Interval between the renewals of a claim.
pub const CLAIM_RENEWAL_INTERVAL: Micros = Micros::from_secs(15);
/// Time for which an observer must have seen a claim unchanged before a user may insist on taking
/// the claim over. Several renewals may fail in this time.
pub const CLAIM_VALIDITY: Micros = Micros::from_secs(60);
/// Time for which the claim of a machine that has probably rebooted must be unchanged.
const REBOOT_PROOF_TIME: Micros = Micros(2 * CLAIM_RENEWAL_INTERVAL.0);
/// Maximum number of claims that an observer remembers. Of further claims it measures no time, so
/// they cannot be taken over by force.
pub const OBSERVED_CLAIMS_MAX: usize = 4096;

/// The last change of a claim that an observer has seen, and when it has seen the change first.
#[derive(Clone, Copy, Debug)]
struct Sighting {
    term: u64,
    renewal: u64,
    first_seen_at: Micros,
}

/// Measures for how long claims have not changed. All times are of the observer's own monotonic
/// clock.
#[derive(Debug, Default)]
pub struct ClaimObserver {
    sightings: BTreeMap<ClaimKey, Sighting>,
}

impl ClaimObserver {
    /// Records that the claim is `claim` now. Returns the time for which the observer has seen it
    /// unchanged.
    pub fn observe(&mut self, now: Micros, key: ClaimKey, claim: &JobClaim) -> Micros {
        let sighting = Sighting {
            term: claim.term,
            renewal: claim.renewal,
            first_seen_at: now,
        };
        if let Some(last_sighting) = self.sightings.get_mut(&key) {
            if (last_sighting.term, last_sighting.renewal) != (claim.term, claim.renewal) {
                *last_sighting = sighting;
            }
            return now.since(last_sighting.first_seen_at);
        }
        if self.sightings.len() < OBSERVED_CLAIMS_MAX {
            self.sightings.insert(key, sighting);
        }
        Micros(0)
    }

    /// Forgets the claims that the store does not have any more.
    pub fn retain(&mut self, is_present: impl Fn(&ClaimKey) -> bool) {
        self.sightings.retain(|key, _| is_present(key));
    }
}

/// What the observer knows about the holder of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderState {
    /// The holder may live: it is on another machine, or it lives on this one.
    MayLive,
    /// The holder's daemon was on this machine and has ended. Its tasks on other hosts end within
    /// its lease.
    Ended,
    /// A machine of the same name and machine id has booted since. A copied machine may have both
    /// in common with a holder that lives; the renewals of such a holder can be seen.
    HasProbablyRebooted,
}

/// Whether a virtual machine may run a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimDecision {
    /// It may run the job, under this term.
    Granted { term: u64 },
    /// It may run the job when this time has passed: tasks of a daemon that has ended may live
    /// until then.
    Wait { time: Micros },
    /// It must not run the job. The user may insist when this time has passed.
    Refused { time_until_force: Micros },
}

/// Decides whether the virtual machine `instance` may run a job whose claim in the store is
/// `claim`. `unchanged_for` is the time for which this observer has seen the claim unchanged.
pub fn decide_claim(
    claim: Option<&JobClaim>,
    instance: u64,
    holder_state: HolderState,
    unchanged_for: Micros,
    is_forced: bool,
) -> ClaimDecision {
    let Some(claim) = claim else {
        return ClaimDecision::Granted { term: 1 };
    };
    if claim.instance == instance {
        return ClaimDecision::Granted { term: claim.term };
    }
    let next_term = ClaimDecision::Granted {
        term: claim.term + 1,
    };
    if claim.is_released {
        return next_term;
    }
    let wait = match holder_state {
        HolderState::MayLive => None,
        HolderState::Ended => Some(claim.lease),
        HolderState::HasProbablyRebooted => Some(claim.lease.max(REBOOT_PROOF_TIME)),
    };
    if let Some(wait) = wait {
        let time = wait.since(unchanged_for);
        return match time {
            Micros(0) => next_term,
            time => ClaimDecision::Wait { time },
        };
    }
    let time_until_force = CLAIM_VALIDITY.since(unchanged_for);
    match time_until_force {
        Micros(0) if is_forced => next_term,
        time_until_force => ClaimDecision::Refused { time_until_force },
    }
}

/// True if another virtual machine has taken over the job that `instance` runs under `term`.
pub fn is_taken_over(claim: &JobClaim, instance: u64, term: u64) -> bool {
    claim.instance != instance && claim.term >= term
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Tid;
    use sempa_proto::checkpoint::JobHolder;

    const KEY: ClaimKey = ClaimKey {
        job: Tid::from_raw(0x40001),
        origin: Micros(7),
    };

    fn claim(instance: u64, term: u64, renewal: u64) -> JobClaim {
        JobClaim {
            term,
            renewal,
            instance,
            is_released: false,
            lease: Micros::from_secs(12),
            holder: JobHolder {
                vm: "pvm".into(),
                host: "h1".into(),
                user: "root".into(),
                pid: 1,
                since: Micros(0),
            },
            process: String::new(),
        }
    }

    fn decide(
        claim: &JobClaim,
        state: HolderState,
        seconds: u64,
        is_forced: bool,
    ) -> ClaimDecision {
        decide_claim(Some(claim), 2, state, Micros::from_secs(seconds), is_forced)
    }

    /// A claim is free if nobody holds it, and remains free for its own holder.
    #[test]
    fn free_and_own_claims_are_granted() {
        let decision = decide_claim(None, 2, HolderState::MayLive, Micros(0), false);
        assert_eq!(decision, ClaimDecision::Granted { term: 1 });
        assert_eq!(
            decide(&claim(2, 5, 9), HolderState::MayLive, 0, false),
            ClaimDecision::Granted { term: 5 }
        );
        let released_claim = JobClaim {
            is_released: true,
            ..claim(1, 5, 9)
        };
        assert_eq!(
            decide(&released_claim, HolderState::MayLive, 0, false),
            ClaimDecision::Granted { term: 6 }
        );
    }

    /// A claim of a holder that may live is never taken over without force, and with force only
    /// when its validity has passed.
    #[test]
    fn living_holder_is_replaced_by_force_after_validity() {
        let held_claim = claim(1, 5, 9);
        for (seconds, is_forced, seconds_until_force) in [
            (0, false, 60),
            (0, true, 60),
            (59, true, 1),
            (60, false, 0),
            (900, false, 0),
        ] {
            assert_eq!(
                decide(&held_claim, HolderState::MayLive, seconds, is_forced),
                ClaimDecision::Refused {
                    time_until_force: Micros::from_secs(seconds_until_force)
                },
                "{seconds} s, {is_forced}"
            );
        }
        assert_eq!(
            decide(&held_claim, HolderState::MayLive, 60, true),
            ClaimDecision::Granted { term: 6 }
        );
    }

    /// The claim of a daemon that has ended on this machine is free when its tasks elsewhere have
    /// ended with their leases.
    #[test]
    fn ended_holder_is_replaced_after_its_lease() {
        let held_claim = claim(1, 5, 9);
        assert_eq!(
            decide(&held_claim, HolderState::Ended, 2, true),
            ClaimDecision::Wait {
                time: Micros::from_secs(10)
            }
        );
        assert_eq!(
            decide(&held_claim, HolderState::Ended, 12, false),
            ClaimDecision::Granted { term: 6 }
        );
    }

    /// A copied machine with the name and the machine id of the holder must not hide the holder's
    /// renewals.
    #[test]
    fn probably_rebooted_holder_is_replaced_after_two_renewal_intervals() {
        let held_claim = claim(1, 5, 9);
        let state = HolderState::HasProbablyRebooted;
        assert_eq!(
            decide(&held_claim, state, 12, true),
            ClaimDecision::Wait {
                time: Micros::from_secs(18)
            }
        );
        assert_eq!(
            decide(&held_claim, state, 30, false),
            ClaimDecision::Granted { term: 6 }
        );
    }

    /// Each renewal restarts the observer's measurement, whatever the clocks of the hosts are.
    #[test]
    fn renewals_restart_the_measurement() {
        let mut observer = ClaimObserver::default();
        let at = Micros::from_secs;
        assert_eq!(observer.observe(at(100), KEY, &claim(1, 5, 9)), Micros(0));
        assert_eq!(observer.observe(at(150), KEY, &claim(1, 5, 9)), at(50));
        assert_eq!(observer.observe(at(155), KEY, &claim(1, 5, 10)), Micros(0));
        assert_eq!(observer.observe(at(214), KEY, &claim(1, 5, 10)), at(59));
        assert_eq!(observer.observe(at(215), KEY, &claim(2, 6, 10)), Micros(0));
        observer.retain(|_| false);
        assert_eq!(observer.observe(at(300), KEY, &claim(2, 6, 10)), Micros(0));
    }

    #[test]
    fn number_of_observed_claims_is_limited() {
        let mut observer = ClaimObserver::default();
        let key = |n: usize| ClaimKey {
            origin: Micros(n as u64),
            ..KEY
        };
        for n in 0..=OBSERVED_CLAIMS_MAX {
            observer.observe(Micros(0), key(n), &claim(1, 1, 1));
        }
        let later = Micros::from_secs(90);
        let age_of =
            |observer: &mut ClaimObserver, n| observer.observe(later, key(n), &claim(1, 1, 1));
        assert_eq!(age_of(&mut observer, 0), later);
        assert_eq!(age_of(&mut observer, OBSERVED_CLAIMS_MAX), Micros(0));
    }

    /// The holder itself and earlier terms take nothing over.
    #[test]
    fn only_later_terms_of_others_take_over() {
        assert!(is_taken_over(&claim(1, 6, 1), 2, 5));
        assert!(!is_taken_over(&claim(2, 5, 1), 2, 5));
        assert!(!is_taken_over(&claim(1, 4, 1), 2, 5));
    }
}
