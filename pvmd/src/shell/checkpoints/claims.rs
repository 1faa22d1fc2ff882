//! The claims of jobs in the store: they name the virtual machine that runs a job, so that no other
//! one restarts it meanwhile. [`checkpoint_protocol::decide_claim`] makes the decisions.
//!
//! This virtual machine claims a job with its first checkpoint, or when it restarts the job, renews
//! its claims regularly, and releases them when the job has ended. If another virtual machine has
//! taken a job over, the main loop ends the job here.

use super::{CheckpointError, CheckpointService, lock};
use crate::shell::input::{Input, InputSender, LogRateLimit};
use checkpoint::boot_clock;
use checkpoint::store::CheckpointStore;
use checkpoint_protocol::{
    CLAIM_RENEWAL_INTERVAL, ClaimDecision, ClaimObserver, HolderState, decide_claim, is_taken_over,
};
use pvmd_machine::io::Event;
use ring::rand::{SecureRandom, SystemRandom};
use sempa_notes::{ProcessIdentity, ProcessState};
use sempa_proto::Micros;
use sempa_proto::checkpoint::{ClaimKey, JobClaim, JobHolder, RestartFailure, StoreFailure};
use sempa_proto::frame::{from_bytes, to_bytes};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;
use tokio::time::timeout;

/// Time limit for the release of all claims when the daemon ends. Claims that are not released are
/// free when the daemon has ended and its lease has passed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two removals of claims without a job.
const CLAIM_REMOVAL_INTERVAL: Micros = Micros::from_secs(3600);
/// Longest pause between two looks at a claim whose holder has just ended.
const WAIT_STEP_MAX: Micros = Micros::from_secs(1);

/// The name of this virtual machine in claims.
#[derive(Clone, Debug)]
pub(crate) struct ClaimIdentity {
    instance: u64,
    vm: String,
    host: String,
    user: String,
    lease: Micros,
    process: ProcessIdentity,
}

impl ClaimIdentity {
    /// Creates the identity of this daemon. `lease` is the time within which all tasks of the
    /// virtual machine have ended after the end of the master's daemon.
    pub(crate) fn new(vm: &str, host: &str, lease: Micros) -> Self {
        let mut bytes = [0; 8];
        let uid = nix::unistd::getuid();
        let user = nix::unistd::User::from_uid(uid).ok().flatten();
        // Without random numbers TLS would have failed before.
        let _ = SystemRandom::new().fill(&mut bytes);
        Self {
            instance: u64::from_ne_bytes(bytes),
            vm: vm.into(),
            host: host.into(),
            user: user.map_or_else(|| uid.to_string(), |user| user.name),
            lease,
            process: ProcessIdentity::of_this_process(),
        }
    }

    fn claim(&self, term: u64, renewal: u64, since: Micros) -> JobClaim {
        JobClaim {
            term,
            renewal,
            instance: self.instance,
            is_released: false,
            lease: self.lease,
            holder: JobHolder {
                vm: self.vm.clone(),
                host: self.host.clone(),
                user: self.user.clone(),
                pid: self.process.pid.cast_unsigned(),
                since,
            },
            process: self.process.encode(),
        }
    }

    fn state_of(&self, claim: &JobClaim) -> HolderState {
        let Some(process) = ProcessIdentity::decode(&claim.process) else {
            return HolderState::MayLive;
        };
        let is_same_host = claim.holder.host == self.host;
        match self.process.state_of(&process, is_same_host) {
            ProcessState::MayLive => HolderState::MayLive,
            ProcessState::Ended => HolderState::Ended,
            ProcessState::HasProbablyRebooted => HolderState::HasProbablyRebooted,
        }
    }
}

/// A claim of this virtual machine.
#[derive(Clone, Copy, Debug)]
struct HeldClaim {
    term: u64,
    since: Micros,
    /// True if the store has the claim. Until then a failed write ends the claim.
    is_stored: bool,
}

#[derive(Debug, Default)]
struct ClaimState {
    held_claims: BTreeMap<ClaimKey, HeldClaim>,
    /// Jobs that run here and could not be claimed with their first checkpoint. The next renewal
    /// claims them. The value is the time at which the job was to be claimed.
    unclaimed_jobs: BTreeMap<ClaimKey, Micros>,
    observer: ClaimObserver,
    /// The claims that restarts in progress need, by the number of the restart.
    claims_of_restarts: HashMap<u64, ClaimKey>,
    /// Claims that only restarts in progress need. The end of the last one releases the claim,
    /// unless the job runs then.
    restart_only_claims: BTreeSet<ClaimKey>,
    /// Time of the last renewal on the boot clock.
    last_renewal_at: Option<Micros>,
    /// Time of the last removal of claims without a job, on the boot clock.
    last_removal_at: Option<Micros>,
    is_renewing: bool,
}

impl ClaimState {
    fn is_needed_by_restart(&self, key: ClaimKey) -> bool {
        self.claims_of_restarts.values().any(|used| *used == key)
    }
}

/// The claims of this virtual machine. All clones share one state.
#[derive(Clone)]
pub(super) struct JobClaims {
    identity: Arc<ClaimIdentity>,
    state: Arc<Mutex<ClaimState>>,
    log_limit: Arc<LogRateLimit>,
}

/// Why a job could not be claimed.
#[derive(Debug)]
pub(super) enum ClaimFailure {
    /// The job runs elsewhere. If this virtual machine has its claim, the job was taken over.
    RunsElsewhere {
        holder: JobHolder,
        time_until_force: Micros,
    },
    Store(CheckpointError),
}

impl From<ClaimFailure> for RestartFailure {
    fn from(failure: ClaimFailure) -> Self {
        match failure {
            ClaimFailure::RunsElsewhere {
                holder,
                time_until_force,
                ..
            } => Self::RunsElsewhere {
                holder,
                time_until_force,
            },
            ClaimFailure::Store(error) => Self::Store(error.into()),
        }
    }
}

impl From<ClaimFailure> for StoreFailure {
    fn from(failure: ClaimFailure) -> Self {
        match failure {
            ClaimFailure::RunsElsewhere { holder, .. } => {
                Self(format!("the job was restarted in {holder}"))
            }
            ClaimFailure::Store(error) => error.into(),
        }
    }
}

impl JobClaims {
    pub(super) fn new(identity: ClaimIdentity) -> Self {
        Self {
            identity: Arc::new(identity),
            state: Arc::default(),
            log_limit: Arc::new(LogRateLimit::new()),
        }
    }

    /// Claims a job for this virtual machine, or confirms its claim. Waits while tasks of a daemon
    /// that has ended on this machine may still live elsewhere. Returns true if this virtual
    /// machine had no claim. Blocks.
    pub(super) fn claim_job(
        &self,
        store: &CheckpointStore,
        key: ClaimKey,
        now: Micros,
        is_forced: bool,
    ) -> Result<bool, ClaimFailure> {
        // The shared observer measures no time if it has too many claims. This one ends the wait.
        let mut observer = ClaimObserver::default();
        loop {
            let mut result = Ok(false);
            let mut wait_time = None;
            let update = |content: Option<&[u8]>| {
                let claim = match content.map(from_bytes::<JobClaim>).transpose() {
                    Ok(claim) => claim,
                    Err(source) => {
                        result = Err(ClaimFailure::Store(CheckpointError::DecodeClaim(source)));
                        return None;
                    }
                };
                match self.decide(key, claim.as_ref(), is_forced, &mut observer) {
                    Ok(ClaimDecision::Granted { term }) => {
                        let (is_new, new_claim) = self.hold(key, term, claim.as_ref(), now);
                        result = Ok(is_new);
                        to_bytes(&new_claim).ok()
                    }
                    Ok(ClaimDecision::Wait { time }) => {
                        wait_time = Some(time);
                        None
                    }
                    Ok(ClaimDecision::Refused { time_until_force }) => {
                        let holder = claim?.holder;
                        result = Err(ClaimFailure::RunsElsewhere {
                            holder,
                            time_until_force,
                        });
                        None
                    }
                    Err(failure) => {
                        result = Err(failure);
                        None
                    }
                }
            };
            if let Err(error) = store.update_claim(key, update) {
                self.undo_hold(store, key);
                return Err(ClaimFailure::Store(CheckpointError::Claim(error)));
            }
            if result.is_ok() && wait_time.is_none() {
                self.confirm_hold(key);
            }
            let Some(time) = wait_time else { return result };
            sleep(Duration::from_micros(time.min(WAIT_STEP_MAX).0));
        }
    }

    /// Confirms, before a checkpoint is completed, that no other virtual machine has taken over the
    /// job. If one has, reports it to the main loop. Blocks.
    pub(super) fn confirm_claim(
        &self,
        store: &CheckpointStore,
        key: ClaimKey,
        inputs: &InputSender,
    ) -> Result<(), ClaimFailure> {
        let Some(HeldClaim { term, .. }) = lock(&self.state).held_claims.get(&key).copied() else {
            return Ok(());
        };
        let content = store.read_claim(key);
        let content =
            content.map_err(|error| ClaimFailure::Store(CheckpointError::Claim(error)))?;
        match content.and_then(|content| from_bytes::<JobClaim>(&content).ok()) {
            Some(claim) if is_taken_over(&claim, self.identity.instance, term) => {
                self.report_take_over(key, claim.holder.clone(), inputs);
                Err(ClaimFailure::RunsElsewhere {
                    holder: claim.holder,
                    time_until_force: Micros(0),
                })
            }
            _ => Ok(()),
        }
    }

    /// Claims a job that runs here, because its first checkpoint has just been completed. If the
    /// store fails, the next renewal tries again. Blocks.
    pub(super) fn claim_if_new(
        &self,
        store: &CheckpointStore,
        key: ClaimKey,
        now: Micros,
        inputs: &InputSender,
    ) {
        {
            let mut state = lock(&self.state);
            if state.held_claims.contains_key(&key) {
                return;
            }
            state.unclaimed_jobs.insert(key, now);
        }
        match self.claim_job(store, key, now, false) {
            Ok(_) => {
                // The job may have ended meanwhile.
                let has_ended = lock(&self.state).unclaimed_jobs.remove(&key).is_none();
                if has_ended && self.end_hold(key) {
                    self.release(store, &[key]);
                }
            }
            // Another virtual machine has restarted the job from this checkpoint at once.
            Err(ClaimFailure::RunsElsewhere { holder, .. }) => {
                lock(&self.state).unclaimed_jobs.remove(&key);
                let event = Event::JobTakenOver { key, by: holder };
                let _ = inputs.blocking_send(Input::Event(event));
            }
            Err(ClaimFailure::Store(error)) => self.warn(&error),
        }
    }

    /// Decides about a claim. Fails if it was this virtual machine's and was taken over.
    fn decide(
        &self,
        key: ClaimKey,
        claim: Option<&JobClaim>,
        is_forced: bool,
        observer: &mut ClaimObserver,
    ) -> Result<ClaimDecision, ClaimFailure> {
        let mut state = lock(&self.state);
        let instance = self.identity.instance;
        let held_claim = state.held_claims.get(&key).copied();
        if let (Some(claim), Some(held_claim)) = (claim, held_claim)
            && is_taken_over(claim, instance, held_claim.term)
        {
            return Err(ClaimFailure::RunsElsewhere {
                holder: claim.holder.clone(),
                time_until_force: Micros(0),
            });
        }
        let (unchanged_for, holder_state) = match claim {
            Some(claim) => {
                let now = boot_clock::now();
                let observed_time = state.observer.observe(now, key, claim);
                (
                    observed_time.max(observer.observe(now, key, claim)),
                    self.identity.state_of(claim),
                )
            }
            None => (Micros(0), HolderState::MayLive),
        };
        Ok(decide_claim(
            claim,
            instance,
            holder_state,
            unchanged_for,
            is_forced,
        ))
    }

    /// Records that this virtual machine has the claim. Returns whether it had none, and the claim.
    fn hold(
        &self,
        key: ClaimKey,
        term: u64,
        claim: Option<&JobClaim>,
        now: Micros,
    ) -> (bool, JobClaim) {
        let mut state = lock(&self.state);
        let earlier_claim = state.held_claims.get(&key).copied();
        let since = earlier_claim.map_or(now, |held_claim| held_claim.since);
        let is_stored = earlier_claim.is_some_and(|held_claim| held_claim.is_stored);
        let held_claim = HeldClaim {
            term,
            since,
            is_stored,
        };
        // A claim that was just being released must not be, so it is held before it is written.
        state.held_claims.insert(key, held_claim);
        let renewal = claim.map_or(0, |claim| claim.renewal) + 1;
        (!is_stored, self.identity.claim(term, renewal, since))
    }

    /// Records that the store has a claim.
    fn confirm_hold(&self, key: ClaimKey) {
        if let Some(held_claim) = lock(&self.state).held_claims.get_mut(&key) {
            held_claim.is_stored = true;
        }
    }

    /// Ends a new claim that could not be written. The write may have reached the disk.
    fn undo_hold(&self, store: &CheckpointStore, key: ClaimKey) {
        let ended_claim = {
            let mut state = lock(&self.state);
            let is_unstored = state
                .held_claims
                .get(&key)
                .is_some_and(|held_claim| !held_claim.is_stored);
            is_unstored
                .then(|| state.held_claims.remove(&key))
                .flatten()
        };
        if ended_claim.is_some() {
            self.release(store, &[key]);
        }
    }

    /// Ends the claim of a job that does not run any more, unless a restart in progress needs the
    /// claim. Returns true if the claim must be released in the store.
    fn end_hold(&self, key: ClaimKey) -> bool {
        let mut state = lock(&self.state);
        state.unclaimed_jobs.remove(&key);
        if state.is_needed_by_restart(key) {
            state.restart_only_claims.insert(key);
            return false;
        }
        state.restart_only_claims.remove(&key);
        state.held_claims.remove(&key).is_some()
    }

    /// Records that a restart needs a claim, until [`CheckpointService::end_restart_claim`].
    pub(super) fn record_restart(&self, restart: u64, key: ClaimKey) {
        lock(&self.state).claims_of_restarts.insert(restart, key);
    }

    /// Records that only restarts in progress need a claim.
    pub(super) fn record_restart_only(&self, key: ClaimKey) {
        lock(&self.state).restart_only_claims.insert(key);
    }

    /// Renews all claims of this virtual machine and observes the claims of others. Blocks.
    fn renew(&self, store: &CheckpointStore, inputs: &InputSender) {
        let unclaimed_jobs = lock(&self.state).unclaimed_jobs.clone();
        for (key, since) in unclaimed_jobs {
            self.claim_if_new(store, key, since, inputs);
        }
        let held_claims = lock(&self.state).held_claims.clone();
        for (key, HeldClaim { term, since, .. }) in held_claims {
            let mut taken_over_by = None;
            let update = |content: Option<&[u8]>| {
                let claim = content.and_then(|content| from_bytes::<JobClaim>(content).ok());
                if let Some(claim) = &claim
                    && is_taken_over(claim, self.identity.instance, term)
                {
                    taken_over_by = Some(claim.holder.clone());
                    return None;
                }
                // The job may have ended meanwhile.
                let is_held = lock(&self.state).held_claims.contains_key(&key);
                let renewal = claim.map_or(0, |claim| claim.renewal) + 1;
                is_held
                    .then(|| to_bytes(&self.identity.claim(term, renewal, since)).ok())
                    .flatten()
            };
            if let Err(error) = store.update_claim(key, update) {
                self.warn(&CheckpointError::Claim(error));
            }
            if let Some(holder) = taken_over_by {
                self.report_take_over(key, holder, inputs);
            }
        }
        self.observe_all(store);
    }

    /// Forgets the claim of a job that was taken over, and reports this to the main loop. Does
    /// nothing if this virtual machine had no claim: then the job of another one is meant.
    pub(super) fn report_take_over(&self, key: ClaimKey, holder: JobHolder, inputs: &InputSender) {
        if lock(&self.state).held_claims.remove(&key).is_some() {
            let event = Event::JobTakenOver { key, by: holder };
            let _ = inputs.blocking_send(Input::Event(event));
        }
    }

    /// Observes the claims of all virtual machines that use the store.
    fn observe_all(&self, store: &CheckpointStore) {
        let claims = match store.read_claims() {
            Ok(claims) => claims,
            Err(error) => return self.warn(&CheckpointError::Claim(error)),
        };
        let mut state = lock(&self.state);
        for (key, content) in &claims {
            if let Ok(claim) = from_bytes::<JobClaim>(content) {
                state.observer.observe(boot_clock::now(), *key, &claim);
            }
        }
        state
            .observer
            .retain(|key| claims.iter().any(|(claimed_key, _)| claimed_key == key));
    }

    /// Removes the claims of ended jobs that have no checkpoint any more, once in each
    /// [`CLAIM_REMOVAL_INTERVAL`].
    fn remove_unneeded_if_due(&self, store: &CheckpointStore, now: Micros) {
        {
            let mut state = lock(&self.state);
            let is_due = state
                .last_removal_at
                .is_none_or(|at| now.since(at) >= CLAIM_REMOVAL_INTERVAL);
            if !is_due {
                return;
            }
            state.last_removal_at = Some(now);
        }
        for (key, _) in store.read_claims().unwrap_or_default() {
            let may_remove = |content: &[u8]| {
                from_bytes::<JobClaim>(content).is_ok_and(|claim| claim.is_released)
            };
            if let Err(error) = store.remove_unneeded_claim(key, may_remove) {
                self.warn(&CheckpointError::Claim(error));
            }
        }
    }

    /// Records in the store that these jobs do not run any more, unless they were claimed again.
    fn release(&self, store: &CheckpointStore, released_claims: &[ClaimKey]) {
        for key in released_claims {
            let update = |content: Option<&[u8]>| {
                let claim: JobClaim = from_bytes(content?).ok()?;
                let is_own = claim.instance == self.identity.instance
                    && !lock(&self.state).held_claims.contains_key(key);
                let released_claim = JobClaim {
                    is_released: true,
                    renewal: claim.renewal + 1,
                    ..claim
                };
                is_own.then(|| to_bytes(&released_claim).ok()).flatten()
            };
            if let Err(error) = store.update_claim(*key, update) {
                self.warn(&CheckpointError::Claim(error));
            }
        }
    }

    fn warn(&self, error: &CheckpointError) {
        if self.log_limit.try_acquire() {
            tracing::warn!("{error}");
        }
    }
}

impl CheckpointService {
    /// Renews the claims of this virtual machine's jobs if that is due. Called once per second on
    /// the master.
    pub(crate) fn renew_claims_if_due(&self) {
        let now = boot_clock::now();
        {
            let mut state = lock(&self.claims.state);
            let is_due = state
                .last_renewal_at
                .is_none_or(|renewed_at| now.since(renewed_at) >= CLAIM_RENEWAL_INTERVAL);
            if state.is_renewing || !is_due {
                return;
            }
            (state.last_renewal_at, state.is_renewing) = (Some(now), true);
        }
        // Opening a store that does not exist would create it.
        if !self.store_exists() {
            lock(&self.claims.state).is_renewing = false;
            return;
        }
        let (claims, inputs) = (self.claims.clone(), self.inputs.clone());
        self.spawn_work(move |store| {
            match store {
                Ok(store) => {
                    claims.remove_unneeded_if_due(&store, now);
                    claims.renew(&store, &inputs);
                }
                Err(error) if lock(&claims.state).held_claims.is_empty() => {
                    tracing::debug!("{error}");
                }
                Err(error) => claims.warn(&error),
            }
            lock(&claims.state).is_renewing = false;
        });
    }

    /// Releases the claim of a job that does not run any more. A restart in progress that needs
    /// the claim keeps it until it ends.
    pub(crate) fn release_job(&self, key: ClaimKey) {
        if !self.claims.end_hold(key) {
            return;
        }
        let claims = self.claims.clone();
        self.spawn_work(move |store| match store {
            Ok(store) => claims.release(&store, &[key]),
            Err(error) => claims.warn(&error),
        });
    }

    /// Ends the part of a restart in the claims. A claim that only this restart needed is released
    /// unless `keeps_claim` is true: the job runs, or shall run.
    pub(super) fn end_restart_claim(&self, restart: u64, keeps_claim: bool) {
        let released_claim = {
            let mut state = lock(&self.claims.state);
            let Some(key) = state.claims_of_restarts.remove(&restart) else {
                return;
            };
            if keeps_claim {
                state.restart_only_claims.remove(&key);
            }
            let is_unneeded =
                state.restart_only_claims.contains(&key) && !state.is_needed_by_restart(key);
            is_unneeded.then_some(key)
        };
        if let Some(key) = released_claim {
            self.release_job(key);
        }
    }

    /// Releases all claims when no task of the virtual machine is left.
    pub(crate) async fn release_all_jobs(&self) {
        let held_claims = std::mem::take(&mut lock(&self.claims.state).held_claims);
        if held_claims.is_empty() {
            return;
        }
        let (claims, open_store) = (self.claims.clone(), self.store_opener());
        let work = tokio::task::spawn_blocking(move || match open_store() {
            Ok(store) => {
                let keys: Vec<ClaimKey> = held_claims.into_keys().collect();
                claims.release(&store, &keys);
            }
            Err(error) => claims.warn(&error),
        });
        if timeout(RELEASE_TIMEOUT, work).await.is_err() {
            tracing::warn!(
                "the store of checkpoints does not answer: another virtual machine may have to wait before it \
                 restarts a job of this one"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::store::StoreLimits;
    use checkpoint_protocol::OBSERVED_CLAIMS_MAX;
    use sempa_proto::{HostId, Tid};
    use std::fs;
    use tokio::sync::mpsc;

    const NOW: Micros = Micros(1_000_000);

    fn key() -> ClaimKey {
        ClaimKey {
            job: Tid::for_task(HostId::MASTER, 1).expect("in range"),
            origin: Micros(77),
        }
    }

    /// Returns the claims of a virtual machine on another machine.
    fn claims_of(vm: &str) -> JobClaims {
        let mut identity = ClaimIdentity::new(vm, "h1", Micros(0));
        identity.process.boot_id = format!("boot of {vm}");
        identity.process.machine_id = format!("machine of {vm}");
        JobClaims::new(identity)
    }

    fn open_store(dir: &tempfile::TempDir) -> CheckpointStore {
        let (store_dir, key_file) = (dir.path().join("store"), dir.path().join("key"));
        CheckpointStore::open(&store_dir, &key_file, StoreLimits::default()).expect("a store")
    }

    /// A second virtual machine is refused until the first one has released the job.
    #[test]
    fn job_is_claimed_by_one_virtual_machine() {
        let dir = tempfile::tempdir().expect("a directory");
        let (store, first, second) = (open_store(&dir), claims_of("first"), claims_of("second"));
        assert!(first.claim_job(&store, key(), NOW, false).expect("free"));
        assert!(!first.claim_job(&store, key(), NOW, false).expect("its own"));
        for is_forced in [false, true] {
            let failure = second.claim_job(&store, key(), NOW, is_forced);
            let Err(ClaimFailure::RunsElsewhere { holder, .. }) = failure else {
                panic!("{failure:?}")
            };
            assert_eq!((&*holder.vm, holder.since), ("first", NOW));
        }
        let held_claims = std::mem::take(&mut lock(&first.state).held_claims);
        first.release(&store, &held_claims.into_keys().collect::<Vec<_>>());
        assert!(second.claim_job(&store, key(), NOW, false).expect("free"));
    }

    /// The virtual machine whose job was taken over learns it with its next renewal or checkpoint,
    /// and does not renew the claim of the other one.
    #[test]
    fn taken_over_job_is_reported_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let (store, first, second) = (open_store(&dir), claims_of("first"), claims_of("second"));
        let (inputs, mut input_queue) = mpsc::channel(8);
        first.claim_job(&store, key(), NOW, false).expect("free");
        first.renew(&store, &inputs);
        // The second virtual machine has observed the claim for long enough.
        store
            .update_claim(key(), |content| {
                let claim: JobClaim = from_bytes(content?).ok()?;
                let (_, new_claim) = second.hold(key(), claim.term + 1, Some(&claim), NOW);
                to_bytes(&new_claim).ok()
            })
            .expect("written");
        let failure = first.claim_job(&store, key(), NOW, true);
        assert!(
            matches!(&failure, Err(ClaimFailure::RunsElsewhere { .. })),
            "{failure:?}"
        );
        for _ in 0..2 {
            first.renew(&store, &inputs);
        }
        let input = input_queue.try_recv();
        let Ok(Input::Event(Event::JobTakenOver { key: taken, by })) = input else {
            panic!("{input:?}")
        };
        assert_eq!((taken, &*by.vm), (key(), "second"));
        assert!(input_queue.try_recv().is_err(), "it is reported once");
        second.renew(&store, &inputs);
        assert!(input_queue.try_recv().is_err(), "the second one has it");
    }

    /// Virtual machines number their jobs independently. A refused or granted claim of another
    /// job with the same number does not affect the claim of the own job.
    #[test]
    fn job_of_the_same_number_is_another_job() {
        let dir = tempfile::tempdir().expect("a directory");
        let (store, first, second) = (open_store(&dir), claims_of("first"), claims_of("second"));
        let (inputs, mut input_queue) = mpsc::channel(8);
        let (own_key, foreign_key) = (
            key(),
            ClaimKey {
                origin: Micros(78),
                ..key()
            },
        );
        first.claim_job(&store, own_key, NOW, false).expect("free");
        second
            .claim_job(&store, foreign_key, NOW, false)
            .expect("free");
        let failure = first.claim_job(&store, foreign_key, NOW, false);
        let Err(ClaimFailure::RunsElsewhere { holder, .. }) = failure else {
            panic!("{failure:?}")
        };
        first.report_take_over(foreign_key, holder, &inputs);
        assert!(input_queue.try_recv().is_err(), "the own job runs on");
        lock(&second.state).held_claims.clear();
        second.release(&store, &[foreign_key]);
        let later = NOW + NOW;
        assert!(
            first
                .claim_job(&store, foreign_key, later, false)
                .expect("free")
        );
        for (key, since) in [(own_key, NOW), (foreign_key, later)] {
            assert_eq!(lock(&first.state).held_claims[&key].since, since);
            let failure = second.claim_job(&store, key, NOW, false);
            assert!(
                matches!(&failure, Err(ClaimFailure::RunsElsewhere { .. })),
                "{failure:?}"
            );
        }
    }

    /// A claim that could not be written is not held. If the job runs, the next renewal claims it.
    #[test]
    fn unwritten_claim_is_not_held() {
        let dir = tempfile::tempdir().expect("a directory");
        let (store, claims) = (open_store(&dir), claims_of("first"));
        let (inputs, mut input_queue) = mpsc::channel(8);
        // A directory in the place of the file that is written first.
        let new_file = format!("claim-{}-{:016x}.new", key().job, key().origin.0);
        let obstacle = dir.path().join("store").join(new_file);
        fs::create_dir(&obstacle).expect("made");
        let failure = claims.claim_job(&store, key(), NOW, false);
        assert!(
            matches!(&failure, Err(ClaimFailure::Store(_))),
            "{failure:?}"
        );
        assert!(lock(&claims.state).held_claims.is_empty());
        claims.claim_if_new(&store, key(), NOW, &inputs);
        assert!(lock(&claims.state).held_claims.is_empty());
        fs::remove_dir(&obstacle).expect("removed");
        claims.renew(&store, &inputs);
        assert!(lock(&claims.state).held_claims[&key()].is_stored);
        assert!(lock(&claims.state).unclaimed_jobs.is_empty());
        assert!(store.read_claim(key()).expect("readable").is_some());
        assert!(input_queue.try_recv().is_err());
    }

    /// The wait for the tasks of a daemon that has ended on this machine ends, also if the
    /// observer has no room for the claim.
    #[test]
    fn wait_for_ended_daemon_ends_with_a_full_observer() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = open_store(&dir);
        let ended_daemon = {
            let mut identity = ClaimIdentity::new("ended", "h1", Micros::from_millis(50));
            identity.process.start_ticks += 1;
            JobClaims::new(identity)
        };
        ended_daemon
            .claim_job(&store, key(), NOW, false)
            .expect("free");
        let claims = JobClaims::new(ClaimIdentity::new("new", "h1", Micros(0)));
        let claim = claims.identity.claim(1, 1, NOW);
        for n in 0..OBSERVED_CLAIMS_MAX {
            let other_key = ClaimKey {
                origin: Micros(1000 + n as u64),
                ..key()
            };
            let mut state = lock(&claims.state);
            state.observer.observe(NOW, other_key, &claim);
        }
        assert!(claims.claim_job(&store, key(), NOW, false).expect("free"));
    }
}
