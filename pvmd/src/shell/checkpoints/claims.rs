//! The claims of jobs in the store: they name the virtual machine that runs a job, so that no other
//! one restarts it meanwhile. [`checkpoint_protocol::decide_claim`] makes the decisions.
//!
//! This virtual machine claims a job with its first checkpoint, or when it restarts the job, renews
//! its claims regularly, and releases them when the job has ended. If another virtual machine has
//! taken a job over, the main loop ends the job here.

use super::{CheckpointError, CheckpointService, lock};
use crate::shell::input::{Input, InputSender, LogRateLimit};
use checkpoint::proc::stat;
use checkpoint::store::CheckpointStore;
use checkpoint_protocol::{
    CLAIM_RENEWAL_INTERVAL, ClaimDecision, ClaimObserver, HolderState, decide_claim, is_taken_over,
};
use nix::time::{ClockId, clock_gettime};
use pvmd_machine::io::Event;
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::checkpoint::{ClaimKey, JobClaim, JobHolder, RestartFailure, StoreFailure};
use sempa_proto::frame::{from_bytes, to_bytes};
use sempa_proto::{Micros, Tid};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Time limit for the release of all claims when the daemon ends. Claims that are not released are
/// free when the daemon has ended and its lease has passed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest pause between two looks at a claim whose holder has just ended.
const WAIT_STEP_MAX: Micros = Micros::from_secs(1);

/// A process of one of the machines that use a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ProcessIdentity {
    machine_id: String,
    boot_id: String,
    pid_namespace: String,
    pid: i32,
    /// Start time of the process in clock ticks since the boot of its machine.
    start_ticks: u64,
}

impl ProcessIdentity {
    fn of_this_process() -> Self {
        let read = |path: &str| {
            fs::read_to_string(path)
                .unwrap_or_default()
                .trim()
                .to_string()
        };
        let pid_namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let pid = std::process::id().cast_signed();
        Self {
            machine_id: read("/etc/machine-id"),
            boot_id: read("/proc/sys/kernel/random/boot_id"),
            pid_namespace: pid_namespace.to_string_lossy().into_owned(),
            pid,
            start_ticks: stat(pid).map_or(0, |stat| stat.starttime),
        }
    }

    fn encode(&self) -> String {
        format!(
            "{}/{}/{}/{}/{}",
            self.machine_id, self.boot_id, self.pid_namespace, self.pid, self.start_ticks
        )
    }

    fn decode(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let [machine_id, boot_id, pid_namespace, pid, start_ticks] = parts[..] else {
            return None;
        };
        Some(Self {
            machine_id: machine_id.into(),
            boot_id: boot_id.into(),
            pid_namespace: pid_namespace.into(),
            pid: pid.parse().ok()?,
            start_ticks: start_ticks.parse().ok()?,
        })
    }

    /// Returns what this process can tell about another one. `is_same_host` is true if both are on
    /// a host of the same name.
    fn state_of(&self, other: &Self, is_same_host: bool) -> HolderState {
        if self.boot_id.is_empty() || other.boot_id.is_empty() {
            return HolderState::MayLive;
        }
        if self.boot_id != other.boot_id {
            // Copied machines may have the same machine id; then their host names differ.
            let has_rebooted =
                is_same_host && !self.machine_id.is_empty() && self.machine_id == other.machine_id;
            return match has_rebooted {
                true => HolderState::Ended,
                false => HolderState::MayLive,
            };
        }
        // A process of another namespace cannot be looked up.
        if self.pid_namespace.is_empty() || self.pid_namespace != other.pid_namespace {
            return HolderState::MayLive;
        }
        let is_alive = stat(other.pid)
            .is_some_and(|stat| stat.starttime == other.start_ticks && stat.state != 'Z');
        match is_alive {
            true => HolderState::MayLive,
            false => HolderState::Ended,
        }
    }
}

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
        ProcessIdentity::decode(&claim.process).map_or(HolderState::MayLive, |process| {
            self.process
                .state_of(&process, claim.holder.host == self.host)
        })
    }
}

/// A claim of this virtual machine.
#[derive(Clone, Copy, Debug)]
struct HeldClaim {
    key: ClaimKey,
    term: u64,
    since: Micros,
}

#[derive(Debug, Default)]
struct ClaimState {
    held_claims: BTreeMap<Tid, HeldClaim>,
    observer: ClaimObserver,
    /// Jobs that restarts in progress have claimed, by the number of the restart.
    claimed_by_restarts: HashMap<u64, Tid>,
    last_renewal_at: Option<Instant>,
    is_renewing: bool,
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
                match self.decide(key, claim.as_ref(), is_forced) {
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
            let store_result = store.update_claim(key, update);
            store_result.map_err(|error| ClaimFailure::Store(CheckpointError::Claim(error)))?;
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
        let Some(HeldClaim { term, .. }) = lock(&self.state).held_claims.get(&key.job).copied()
        else {
            return Ok(());
        };
        let content = store.read_claim(key);
        let content =
            content.map_err(|error| ClaimFailure::Store(CheckpointError::Claim(error)))?;
        match content.and_then(|content| from_bytes::<JobClaim>(&content).ok()) {
            Some(claim) if is_taken_over(&claim, self.identity.instance, term) => {
                self.report_take_over(key.job, claim.holder.clone(), inputs);
                Err(ClaimFailure::RunsElsewhere {
                    holder: claim.holder,
                    time_until_force: Micros(0),
                })
            }
            _ => Ok(()),
        }
    }

    /// Claims a job whose first checkpoint has just been completed. Blocks.
    pub(super) fn claim_if_new(
        &self,
        store: &CheckpointStore,
        key: ClaimKey,
        now: Micros,
        inputs: &InputSender,
    ) {
        if lock(&self.state).held_claims.contains_key(&key.job) {
            return;
        }
        match self.claim_job(store, key, now, false) {
            Ok(_) => {}
            // Another virtual machine has restarted the job from this checkpoint at once.
            Err(ClaimFailure::RunsElsewhere { holder, .. }) => {
                let event = Event::JobTakenOver {
                    job: key.job,
                    by: holder,
                };
                let _ = inputs.blocking_send(Input::Event(event));
            }
            // The next renewal writes the claim.
            Err(ClaimFailure::Store(error)) => self.warn(&error),
        }
    }

    /// Decides about a claim. Fails if it was this virtual machine's and was taken over.
    fn decide(
        &self,
        key: ClaimKey,
        claim: Option<&JobClaim>,
        is_forced: bool,
    ) -> Result<ClaimDecision, ClaimFailure> {
        let mut state = lock(&self.state);
        let instance = self.identity.instance;
        let held_claim = state.held_claims.get(&key.job).copied();
        if let (Some(claim), Some(held_claim)) = (claim, held_claim)
            && held_claim.key == key
            && is_taken_over(claim, instance, held_claim.term)
        {
            return Err(ClaimFailure::RunsElsewhere {
                holder: claim.holder.clone(),
                time_until_force: Micros(0),
            });
        }
        let (unchanged_for, holder_state) = match claim {
            Some(claim) => (
                state.observer.observe(boot_time(), key, claim),
                self.identity.state_of(claim),
            ),
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
        let since = state
            .held_claims
            .get(&key.job)
            .map_or(now, |held_claim| held_claim.since);
        let held_claim = HeldClaim { key, term, since };
        let is_new = state.held_claims.insert(key.job, held_claim).is_none();
        let renewal = claim.map_or(0, |claim| claim.renewal) + 1;
        (is_new, self.identity.claim(term, renewal, since))
    }

    /// Records that a restart has claimed a job.
    pub(super) fn record_restart(&self, restart: u64, job: Tid) {
        lock(&self.state).claimed_by_restarts.insert(restart, job);
    }

    /// Renews all claims of this virtual machine and observes the claims of others. Blocks.
    fn renew(&self, store: &CheckpointStore, inputs: &InputSender) {
        let held_claims: Vec<HeldClaim> = lock(&self.state).held_claims.values().copied().collect();
        for held_claim in held_claims {
            let HeldClaim { key, term, since } = held_claim;
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
                let is_held = lock(&self.state).held_claims.contains_key(&key.job);
                let renewal = claim.map_or(0, |claim| claim.renewal) + 1;
                is_held
                    .then(|| to_bytes(&self.identity.claim(term, renewal, since)).ok())
                    .flatten()
            };
            if let Err(error) = store.update_claim(key, update) {
                self.warn(&CheckpointError::Claim(error));
            }
            if let Some(holder) = taken_over_by {
                self.report_take_over(key.job, holder, inputs);
            }
        }
        self.observe_all(store);
    }

    /// Forgets the claim of a job that was taken over, and reports this to the main loop.
    pub(super) fn report_take_over(&self, job: Tid, holder: JobHolder, inputs: &InputSender) {
        if lock(&self.state).held_claims.remove(&job).is_some() {
            let event = Event::JobTakenOver { job, by: holder };
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
                state.observer.observe(boot_time(), *key, &claim);
            }
        }
        state
            .observer
            .retain(|key| claims.iter().any(|(claimed_key, _)| claimed_key == key));
    }

    /// Removes the claims of ended jobs that have no checkpoint any more.
    fn remove_unneeded(&self, store: &CheckpointStore) {
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
    fn release(&self, store: &CheckpointStore, released_claims: &[HeldClaim]) {
        for HeldClaim { key, .. } in released_claims {
            let update = |content: Option<&[u8]>| {
                let claim: JobClaim = from_bytes(content?).ok()?;
                let is_own = claim.instance == self.identity.instance
                    && !lock(&self.state).held_claims.contains_key(&key.job);
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
        let interval = Duration::from_micros(CLAIM_RENEWAL_INTERVAL.0);
        let is_first = {
            let mut state = lock(&self.claims.state);
            let is_due = state
                .last_renewal_at
                .is_none_or(|renewed_at| renewed_at.elapsed() >= interval);
            if state.is_renewing || !is_due {
                return;
            }
            let is_first = state.last_renewal_at.is_none();
            (state.last_renewal_at, state.is_renewing) = (Some(Instant::now()), true);
            is_first
        };
        // Opening a store that does not exist would create it.
        if !self.store_exists() {
            lock(&self.claims.state).is_renewing = false;
            return;
        }
        let (claims, inputs) = (self.claims.clone(), self.inputs.clone());
        self.spawn_work(move |store| {
            match store {
                Ok(store) => {
                    if is_first {
                        claims.remove_unneeded(&store);
                    }
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

    /// Releases the claim of a job that does not run any more.
    pub(crate) fn release_job(&self, job: Tid) {
        let Some(held_claim) = lock(&self.claims.state).held_claims.remove(&job) else {
            return;
        };
        let claims = self.claims.clone();
        self.spawn_work(move |store| match store {
            Ok(store) => claims.release(&store, &[held_claim]),
            Err(error) => claims.warn(&error),
        });
    }

    /// Ends the part of a restart in the claims: if the restart has failed, a job that it has
    /// claimed is released.
    pub(super) fn end_restart_claim(&self, restart: u64, keeps_claim: bool) {
        let job = lock(&self.claims.state)
            .claimed_by_restarts
            .remove(&restart);
        if let (Some(job), false) = (job, keeps_claim) {
            self.release_job(job);
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
                let held_claims: Vec<HeldClaim> = held_claims.into_values().collect();
                claims.release(&store, &held_claims);
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

/// Returns the time since the boot of this machine, including the time that it was suspended.
fn boot_time() -> Micros {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Micros(0), |time| {
        let time = Duration::from(time);
        Micros(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::store::StoreLimits;
    use sempa_proto::HostId;
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
        first.release(&store, &held_claims.into_values().collect::<Vec<_>>());
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
        let Ok(Input::Event(Event::JobTakenOver { job, by })) = input else {
            panic!("{input:?}")
        };
        assert_eq!((job, &*by.vm), (key().job, "second"));
        assert!(input_queue.try_recv().is_err(), "it is reported once");
        second.renew(&store, &inputs);
        assert!(input_queue.try_recv().is_err(), "the second one has it");
    }

    /// A daemon that has ended on this machine holds nothing; one that lives does, and one on
    /// another machine may.
    #[test]
    fn ended_daemon_of_this_machine_is_recognized() {
        let own = ProcessIdentity::of_this_process();
        assert_eq!(ProcessIdentity::decode(&own.encode()), Some(own.clone()));
        assert_eq!(own.state_of(&own, true), HolderState::MayLive);
        let reused_pid = ProcessIdentity {
            start_ticks: own.start_ticks + 1,
            ..own.clone()
        };
        assert_eq!(own.state_of(&reused_pid, true), HolderState::Ended);
        let other_namespace = ProcessIdentity {
            pid_namespace: "pid:[1]".into(),
            ..reused_pid.clone()
        };
        assert_eq!(own.state_of(&other_namespace, true), HolderState::MayLive);
        let machine = ProcessIdentity {
            machine_id: "m".into(),
            ..own.clone()
        };
        let earlier_boot = ProcessIdentity {
            boot_id: "earlier".into(),
            ..machine.clone()
        };
        assert_eq!(machine.state_of(&earlier_boot, true), HolderState::Ended);
        assert_eq!(machine.state_of(&earlier_boot, false), HolderState::MayLive);
        let unknown = ProcessIdentity::default();
        assert_eq!(own.state_of(&unknown, true), HolderState::MayLive);
    }
}
