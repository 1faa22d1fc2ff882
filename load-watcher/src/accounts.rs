//! Looks up accounts of this machine in a separate thread.
//!
//! The accounts may come from a server that does not answer for a long time, and the load watcher
//! must protect the owner meanwhile. So it never waits for an answer: it uses the answers that have
//! arrived, and a descriptor becomes readable when there are more.

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::{Uid, User};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug, Formatter};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time after which an account that was not found is looked up again.
const NOT_FOUND_AGE_MAX: Duration = Duration::from_secs(600);
/// Interval at which the descriptor becomes readable during many lookups.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);

/// The key of a lookup. Names are looked up first, because they come first in the order of the
/// keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AccountKey {
    Name(String),
    Uid(u32),
}

/// The answer to a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccountAnswer {
    /// The account has this uid.
    Found(u32),
    NotFound,
    /// The accounts cannot be read.
    Failed,
}

/// Looks up an account. May wait for a long time.
fn look_up_account(key: &AccountKey) -> AccountAnswer {
    let result = match key {
        AccountKey::Name(name) => User::from_name(name),
        AccountKey::Uid(uid) => User::from_uid(Uid::from_raw(*uid)),
    };
    match result {
        Ok(Some(user)) => AccountAnswer::Found(user.uid.as_raw()),
        Ok(None) => AccountAnswer::NotFound,
        Err(_) => AccountAnswer::Failed,
    }
}

type LookUpFn = Box<dyn Fn(&AccountKey) -> AccountAnswer + Send>;

#[derive(Default)]
struct Lookups {
    wanted: BTreeSet<AccountKey>,
    /// The lookup in progress.
    running: Option<AccountKey>,
    /// The answers that have arrived, and the times of their arrival.
    answers: BTreeMap<AccountKey, (AccountAnswer, Instant)>,
    /// True if the thread must end.
    is_closed: bool,
}

/// State that [`Accounts`] shares with its thread.
struct SharedLookups {
    lookups: Mutex<Lookups>,
    wanted_event: Condvar,
    answer_event: EventFd,
}

/// The accounts of this machine.
pub(crate) struct Accounts {
    shared: Arc<SharedLookups>,
    /// The function that looks up an account; `None` after the thread was started with it.
    look_up: Option<LookUpFn>,
}

impl Accounts {
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        Self::with_lookup(Box::new(look_up_account))
    }

    /// As [`Self::new`]; `look_up` is called in the thread for each lookup.
    pub(crate) fn with_lookup(look_up: LookUpFn) -> io::Result<Self> {
        let shared = Arc::new(SharedLookups {
            lookups: Mutex::default(),
            wanted_event: Condvar::new(),
            answer_event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        });
        Ok(Self {
            shared,
            look_up: Some(look_up),
        })
    }

    /// Returns the answers for these keys that have arrived. The other keys are looked up, and
    /// those that were not found a long time ago are looked up again. All other answers are
    /// forgotten. The first call starts the thread; if this fails, nothing is looked up.
    pub(crate) fn answers(
        &mut self,
        keys: BTreeSet<AccountKey>,
    ) -> BTreeMap<AccountKey, AccountAnswer> {
        if let Some(look_up) = self.look_up.take() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("accounts".into());
            if let Err(error) = thread.spawn(move || shared.run_lookups(&look_up)) {
                tracing::warn!("accounts cannot be looked up: {error}");
            }
        }
        let mut guard = self.shared.lock();
        let lookups = &mut *guard;
        lookups.answers.retain(|key, _| keys.contains(key));
        let is_current = |key: &AccountKey| match lookups.answers.get(key) {
            Some((AccountAnswer::Found(_), _)) => true,
            Some((_, at)) => at.elapsed() < NOT_FOUND_AGE_MAX,
            None => lookups.running.as_ref() == Some(key),
        };
        lookups.wanted = keys.into_iter().filter(|key| !is_current(key)).collect();
        self.shared.wanted_event.notify_one();
        let answers = lookups.answers.iter();
        answers
            .map(|(key, (answer, _))| (key.clone(), *answer))
            .collect()
    }

    /// Forgets all answers, and stops all lookups but the running one.
    pub(crate) fn forget(&self) {
        let mut lookups = self.shared.lock();
        lookups.wanted.clear();
        lookups.answers.clear();
    }

    /// Returns a descriptor that is readable after answers have arrived.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.answer_event.as_fd()
    }

    /// Returns true if answers have arrived since the last call.
    pub(crate) fn take_answer_event(&self) -> bool {
        self.shared.answer_event.read().is_ok()
    }
}

impl Debug for Accounts {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accounts").finish_non_exhaustive()
    }
}

impl Drop for Accounts {
    fn drop(&mut self) {
        // The thread is not joined: its lookup may take long.
        self.shared.lock().is_closed = true;
        self.shared.wanted_event.notify_one();
    }
}

impl SharedLookups {
    fn lock(&self) -> MutexGuard<'_, Lookups> {
        self.lookups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up what is wanted until the [`Accounts`] are dropped. Makes the descriptor readable
    /// after the last name, after the last lookup, and at an interval meanwhile.
    fn run_lookups(&self, look_up: &LookUpFn) {
        let mut last_event_at = Instant::now();
        let mut lookups = self.lock();
        while !lookups.is_closed {
            let Some(key) = lookups.wanted.pop_first() else {
                let result = self.wanted_event.wait(lookups);
                lookups = result.unwrap_or_else(PoisonError::into_inner);
                last_event_at = Instant::now();
                continue;
            };
            lookups.running = Some(key.clone());
            // The lock must not be held during a lookup that may take long.
            drop(lookups);
            let answer = look_up(&key);
            lookups = self.lock();
            lookups.running = None;
            let next_is_name = matches!(lookups.wanted.first(), Some(AccountKey::Name(_)));
            let is_last_name = matches!(&key, AccountKey::Name(_)) && !next_is_name;
            lookups.answers.insert(key, (answer, Instant::now()));
            let is_due = last_event_at.elapsed() >= EVENT_INTERVAL;
            if is_last_name || lookups.wanted.is_empty() || is_due {
                last_event_at = Instant::now();
                // Fails only if the descriptor is already readable.
                let _ = self.answer_event.write(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, poll};
    use std::sync::mpsc;

    fn wait_for_answers(accounts: &Accounts) {
        let mut fds = [PollFd::new(accounts.fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, 20_000_u16), Ok(1));
        assert!(accounts.take_answer_event());
    }

    /// Answers arrive later, names first. What is not wanted any more is forgotten.
    #[test]
    fn answers_arrive_while_nobody_waits() {
        let (sender, permissions) = mpsc::channel::<()>();
        let mut accounts = Accounts::with_lookup(Box::new(move |key| {
            permissions.recv().expect("the test permits it");
            match key {
                AccountKey::Name(_) => AccountAnswer::Found(7),
                AccountKey::Uid(uid) if *uid < 10 => AccountAnswer::Found(*uid),
                AccountKey::Uid(_) => AccountAnswer::NotFound,
            }
        }))
        .expect("a descriptor");
        let name = AccountKey::Name("olga".into());
        let uids = [AccountKey::Uid(3), AccountKey::Uid(30)];
        let keys: BTreeSet<AccountKey> = uids.iter().chain([&name]).cloned().collect();
        // The thread has not answered yet.
        assert!(accounts.answers(keys.clone()).is_empty());
        assert!(accounts.answers(keys.clone()).is_empty());
        sender.send(()).expect("the thread runs");
        wait_for_answers(&accounts);
        let answers = accounts.answers(keys.clone());
        assert_eq!(
            answers.into_iter().collect::<Vec<_>>(),
            [(name.clone(), AccountAnswer::Found(7))]
        );
        (0..2).for_each(|_| sender.send(()).expect("the thread runs"));
        while accounts.answers(keys.clone()).len() < 3 {
            wait_for_answers(&accounts);
        }
        let answers = accounts.answers(keys);
        assert_eq!(answers[&uids[0]], AccountAnswer::Found(3));
        assert_eq!(answers[&uids[1]], AccountAnswer::NotFound);
        let answers = accounts.answers([name.clone()].into());
        assert_eq!(answers.len(), 1);
        accounts.forget();
        assert!(accounts.answers(BTreeSet::new()).is_empty());
    }

    /// The real accounts: root exists on every machine.
    #[test]
    fn root_has_an_account() {
        let root = AccountKey::Uid(0);
        assert_eq!(look_up_account(&root), AccountAnswer::Found(0));
        let unknown = AccountKey::Name("nobody has this name".into());
        assert_ne!(look_up_account(&unknown), AccountAnswer::Found(0));
    }
}
