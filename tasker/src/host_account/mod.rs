//! The record of this tasker in the account of its host
//! ([`sempa_service_settings::host_account`]).
//!
//! The limits of a user hold for all virtual machines of the user on the host together, and the cap
//! of the owner for those of all users. So a tasker claims what it wants to use: under a lock it
//! reads the records of all taskers, checks the limits, and replaces its own record. Two taskers
//! cannot both claim the last place. What a tasker gives up it records without a lock.
//!
//! Only root can open the lock. Users can open the records, and a lock of a user on a record has no
//! effect.

mod memory;

pub(crate) use memory::MemoryWatch;

use crate::supervisor::Supervisor;
use crate::task_user::{TaskUser, with_own_file_rights};
use checkpoint::proc;
use nix::fcntl::{Flock, FlockArg};
use sempa_proto::MigrationId;
use sempa_proto::host_limit::HostLimit;
use sempa_proto::tasker_service::SessionId;
use sempa_service_settings::LimitKind;
use sempa_service_settings::host_account::{
    ACCOUNT_DIR_VARIABLE, AccountRecord, HostTotals, HostUse, account_dir, is_running,
    read_guest_cap, read_totals, record_path, remove_ended, replace_file,
};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Name of the lock in the directory of the account.
const LOCK_NAME: &str = "lock";
/// Time limit for the lock. Taskers hold it for the time of some reads, which may be long on a
/// loaded machine; one that hangs must not block the others for ever.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Poll interval of the lock.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum number of tasks of one virtual machine that count as its services and not as guests. The
/// daemon tells which tasks these are, and the daemon belongs to the user.
const SERVICES_MAX: usize = 4;

/// Why a tasker may not use more.
#[derive(Debug, Error)]
pub(crate) enum ClaimError {
    #[error(transparent)]
    Limit(#[from] HostLimit),
    #[error("the account of this host cannot be used: {0}")]
    Account(#[from] io::Error),
}

/// The user of a tasker, with the limits that hold for all virtual machines of the user together.
/// The greatest number stands for no limit.
#[derive(Clone, Debug)]
struct LimitedUser {
    uid: u32,
    name: String,
    tasks_max: u64,
    memory_bytes_max: u64,
    control_groups_max: u64,
    image_bytes_max: u64,
}

impl LimitedUser {
    /// Returns the user of the tasks; root, without limits, for a tasker of root's tasks.
    fn new(user: Option<&TaskUser>) -> Self {
        let limit = |kind| user.map_or(u64::MAX, |user| user.service_limit(kind));
        Self {
            uid: user.map_or(0, TaskUser::uid),
            name: user.map_or("root", TaskUser::name).to_string(),
            tasks_max: limit(LimitKind::Tasks),
            memory_bytes_max: limit(LimitKind::Memory),
            control_groups_max: limit(LimitKind::ControlGroups),
            image_bytes_max: limit(LimitKind::ImageBytes),
        }
    }
}

/// The record of this tasker, which all its threads share.
#[derive(Clone, Debug)]
pub(crate) struct HostAccount(Arc<Mutex<Account>>);

#[derive(Debug)]
struct Account {
    dir: PathBuf,
    session: SessionId,
    user: LimitedUser,
    /// The record as it was last written.
    record: AccountRecord,
}

/// Opens the account for a tasker of root, which runs the tasks of `user` or of root. Returns
/// `None` for a tasker of an ordinary user, and if the account of root's tasks cannot be used.
///
/// # Errors
/// The account cannot be used, so the limits of `user` cannot be checked.
pub(crate) fn open_account(user: Option<&TaskUser>) -> io::Result<Option<HostAccount>> {
    if user.is_none() && !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    let dir = account_dir(std::env::var_os(ACCOUNT_DIR_VARIABLE));
    let own_pid = std::process::id().cast_signed();
    let opened = proc::stat(own_pid)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
        .and_then(|stat| {
            let limited_user = LimitedUser::new(user);
            HostAccount::open(&dir, SessionId(own_pid), stat.starttime, limited_user)
        });
    match opened {
        Ok(account) => Ok(Some(account)),
        Err(error) if user.is_none() => {
            tracing::warn!("the account of this host cannot be used: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl HostAccount {
    /// Creates the record of the tasker with the PID `session`. Removes the records of taskers that
    /// have ended.
    fn open(
        dir: &Path,
        session: SessionId,
        start_ticks: u64,
        user: LimitedUser,
    ) -> io::Result<Self> {
        let record = AccountRecord {
            uid: user.uid,
            start_ticks,
            usage: HostUse::default(),
        };
        let mut account = Account {
            dir: dir.to_path_buf(),
            session,
            user,
            record,
        };
        with_own_file_rights(|| {
            DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
            let _lock = account.lock()?;
            remove_ended(dir, is_running);
            account.write(HostUse::default())
        })?;
        Ok(Self(Arc::new(Mutex::new(account))))
    }

    /// Claims images. The caller releases them.
    ///
    /// # Errors
    /// The user would have more than the administrator allows.
    pub(crate) fn claim_images(&self, bytes: u64) -> Result<(), ClaimError> {
        let mut account = self.account();
        let mut usage = account.record.usage;
        usage.image_bytes = usage.image_bytes.saturating_add(bytes);
        account.claim(usage, |user, others| {
            let used_bytes = others.of_user(user.uid).plus(&usage).image_bytes;
            match used_bytes <= user.image_bytes_max {
                true => Ok(()),
                false => Err(HostLimit::ImagesOfUser {
                    user: user.name.clone(),
                    used_bytes,
                    limit_bytes: user.image_bytes_max,
                }),
            }
        })
    }

    /// Returns the limit of the user's images in bytes; the greatest number without a limit.
    pub(crate) fn image_bytes_max(&self) -> u64 {
        self.account().user.image_bytes_max
    }

    pub(crate) fn release_images(&self, bytes: u64) {
        let mut account = self.account();
        let mut usage = account.record.usage;
        usage.image_bytes = usage.image_bytes.saturating_sub(bytes);
        account.replace(usage);
    }

    /// Claims that this tasker has `count` control groups. Returns false if the user would have
    /// more than the administrator allows, or if this cannot be checked.
    pub(crate) fn claim_control_groups(&self, count: u64) -> bool {
        let mut account = self.account();
        if account.user.control_groups_max == u64::MAX {
            return true;
        }
        let mut usage = account.record.usage;
        usage.control_groups = count;
        let result = account.claim(usage, |user, others| {
            let count = others.of_user(user.uid).plus(&usage).control_groups;
            match count <= user.control_groups_max {
                true => Ok(()),
                // The caller needs no reason.
                false => Err(io::Error::from_raw_os_error(libc::EDQUOT)),
            }
        });
        result.is_ok()
    }

    /// Claims a task. `usage` is the use of this tasker with the task; its images are not
    /// considered. If `is_kept` is false, only checks that the task could be claimed.
    fn claim_task(&self, usage: HostUse, is_kept: bool) -> Result<(), ClaimError> {
        let mut account = self.account();
        let usage = HostUse {
            image_bytes: account.record.usage.image_bytes,
            ..usage
        };
        let cap = read_guest_cap(&account.dir);
        let check = |user: &LimitedUser, others: &HostTotals| check_task(user, others, &usage, cap);
        match is_kept {
            true => account.claim(usage, check),
            false => Ok(check(&account.user, &account.read_others()?)?),
        }
    }

    /// Returns the limit of the user's memory in bytes; `None` without a limit.
    fn memory_limit(&self) -> Option<u64> {
        let limit_bytes = self.account().user.memory_bytes_max;
        (limit_bytes != u64::MAX).then_some(limit_bytes)
    }

    fn user_name(&self) -> String {
        self.account().user.name.clone()
    }

    /// Reads the memory that the other taskers of the user have recorded.
    fn others_of_user(&self) -> io::Result<OtherTaskers> {
        let account = self.account();
        let others = with_own_file_rights(|| account.read_others())?;
        let of_user = others.sessions.iter();
        let of_user = of_user.filter(|session| session.uid == account.user.uid);
        Ok(OtherTaskers {
            own_session: account.session,
            total_bytes: others.of_user(account.user.uid).memory_bytes,
            largest_tasks: of_user
                .map(|session| (session.session, session.usage.largest_task_bytes))
                .collect(),
        })
    }

    /// Records the use of this tasker, except for its images.
    fn record(&self, usage: HostUse) {
        let mut account = self.account();
        let image_bytes = account.record.usage.image_bytes;
        account.replace(HostUse {
            image_bytes,
            ..usage
        });
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        // A panic of another thread leaves a complete record.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of the user's tasks in other virtual machines, in bytes.
#[derive(Debug)]
struct OtherTaskers {
    own_session: SessionId,
    total_bytes: u64,
    /// The killable task that uses most, of each tasker.
    largest_tasks: Vec<(SessionId, u64)>,
}

impl OtherTaskers {
    /// True if no other tasker must kill a task instead of one of this tasker with `bytes`: the one
    /// with the largest task does, and of equal ones that with the lowest PID.
    fn has_no_larger_task(&self, bytes: u64) -> bool {
        self.largest_tasks.iter().all(|(session, other_bytes)| {
            *other_bytes < bytes || (*other_bytes == bytes && *session > self.own_session)
        })
    }
}

impl Account {
    /// Replaces the use of this tasker if `check`, which gets the use of all other taskers, permits
    /// it.
    fn claim<E>(
        &mut self,
        usage: HostUse,
        check: impl FnOnce(&LimitedUser, &HostTotals) -> Result<(), E>,
    ) -> Result<(), ClaimError>
    where
        ClaimError: From<E>,
    {
        with_own_file_rights(|| {
            let _lock = self.lock()?;
            check(&self.user, &self.read_others()?)?;
            Ok(self.write(usage)?)
        })
    }

    /// Replaces the use of this tasker without a check.
    fn replace(&mut self, usage: HostUse) {
        if usage != self.record.usage {
            // If this fails, the record is written with the next change. Until then the user has
            // less than the record says.
            let _ = with_own_file_rights(|| self.write(usage));
        }
    }

    fn read_others(&self) -> io::Result<HostTotals> {
        Ok(read_totals(&self.dir, is_running)?.without(self.session))
    }

    fn write(&mut self, usage: HostUse) -> io::Result<()> {
        let record = AccountRecord {
            usage,
            ..self.record
        };
        replace_file(&record_path(&self.dir, self.session), &record.to_string())?;
        self.record = record;
        Ok(())
    }

    fn lock(&self) -> io::Result<Flock<File>> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let open = || {
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(self.dir.join(LOCK_NAME))
        };
        let mut file = open()?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((unlocked_file, nix::errno::Errno::EWOULDBLOCK))
                    if Instant::now() < deadline =>
                {
                    file = unlocked_file;
                    std::thread::sleep(LOCK_POLL_INTERVAL);
                }
                Err((_, error)) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        // A record that remains does not count, and the next tasker removes it.
        let _ = with_own_file_rights(|| fs::remove_file(record_path(&self.dir, self.session)));
    }
}

/// Checks the limits for another task. `usage` is the use of this tasker with the task, and
/// `others` that of all other taskers.
fn check_task(
    user: &LimitedUser,
    others: &HostTotals,
    usage: &HostUse,
    cap: Option<u64>,
) -> Result<(), HostLimit> {
    let of_user = others.of_user(user.uid).plus(usage);
    if of_user.guests > user.tasks_max {
        return Err(HostLimit::TasksOfUser {
            user: user.name.clone(),
            present: of_user.guests - 1,
            limit: user.tasks_max,
        });
    }
    match cap.filter(|cap| others.of_host().plus(usage).guests > *cap) {
        Some(limit) => Err(HostLimit::TasksOfAll { limit }),
        None if of_user.memory_bytes > user.memory_bytes_max => Err(HostLimit::MemoryOfUser {
            user: user.name.clone(),
            used_bytes: of_user.memory_bytes,
            limit_bytes: user.memory_bytes_max,
        }),
        None => Ok(()),
    }
}

impl Supervisor {
    /// Claims a task that is about to start. `is_pinned` is true for a service of the virtual
    /// machine.
    ///
    /// # Errors
    /// A limit of the user or of the host is reached.
    pub(crate) fn claim_start(&self, is_pinned: bool) -> Result<(), ClaimError> {
        let is_service = is_pinned && self.pinned_task_count() < SERVICES_MAX;
        match &self.account {
            // Without its services the user could not use the virtual machine.
            Some(_) if is_service => Ok(()),
            Some(account) => account.claim_task(self.usage_with_guest(0), true),
            None => Ok(()),
        }
    }

    /// Claims a task that arrives by a migration, with its memory.
    ///
    /// # Errors
    /// As for [`Supervisor::claim_start`].
    pub(crate) fn claim_arrival(&self, migration: MigrationId) -> Result<(), ClaimError> {
        let memory_bytes = self.migrations.reservations.checked_bytes(migration);
        match &self.account {
            Some(account) => account.claim_task(self.usage_with_guest(memory_bytes), true),
            None => Ok(()),
        }
    }

    /// Checks that another task could arrive.
    ///
    /// # Errors
    /// As for [`Supervisor::claim_start`].
    pub(crate) fn check_arrival(&self) -> Result<(), ClaimError> {
        match &self.account {
            Some(account) => account.claim_task(self.usage_with_guest(0), false),
            None => Ok(()),
        }
    }

    /// Records what this tasker uses now.
    pub(crate) fn record_usage(&self) {
        if let Some(account) = &self.account {
            account.record(self.usage());
        }
    }

    fn usage_with_guest(&self, memory_bytes: u64) -> HostUse {
        let mut usage = self.usage();
        usage.guests += 1;
        usage.memory_bytes = usage.memory_bytes.saturating_add(memory_bytes);
        usage
    }

    /// Returns the use of this tasker without its images.
    fn usage(&self) -> HostUse {
        let services = self.pinned_task_count().min(SERVICES_MAX);
        let all_tasks = self.tasks.len()
            + self.migrations.incoming_tasks.len()
            + self.leftovers.ended_task_count();
        let (tasks_bytes, largest_task_bytes) = self.memory_watch.measured_bytes();
        let arriving_bytes = self.arriving_memory_bytes();
        HostUse {
            guests: (all_tasks - services) as u64,
            services: services as u64,
            control_groups: self
                .freezer
                .as_ref()
                .map_or(0, |freezer| freezer.group_count()),
            image_bytes: 0,
            memory_bytes: tasks_bytes.saturating_add(arriving_bytes),
            largest_task_bytes,
        }
    }

    fn pinned_task_count(&self) -> usize {
        self.tasks.values().filter(|task| task.is_pinned).count()
    }

    /// Returns the memory of the tasks that arrive, as of their last check.
    fn arriving_memory_bytes(&self) -> u64 {
        let migrations = self.migrations.incoming_tasks.keys();
        let bytes = migrations.map(|id| self.migrations.reservations.checked_bytes(*id));
        bytes.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;
