//! Selects the users whose files in the shared directory are read, if files belong to more users
//! than can be considered.
//!
//! An ordinary user can make files under 65,536 subordinate uids (see `subuid`), which have no
//! account. They must not displace the files of owners, whose uids may be higher. Root, the user of
//! the virtual machine, and the owners and logged-in users precede all others. Of the others, uids
//! with an account come first, then uids that were not looked up yet, then those without an
//! account. Accounts are looked up only if there are too many users.

use crate::accounts::{AccountAnswer, AccountKey, Accounts};
use crate::user_files::FILE_USERS_MAX;
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

/// Precedence of a user; the lowest value comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum UserRank {
    Preferred,
    HasAccount,
    /// The account was not looked up yet, or cannot be looked up.
    Unknown,
    NoAccount,
}

/// The users who are known for other reasons than their files.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownUsers {
    /// Uids that precede all others.
    pub(crate) preferred_uids: BTreeSet<u32>,
    /// Names of users who precede all others.
    pub(crate) preferred_names: BTreeSet<String>,
    /// Users whose files are in force. They keep their places among users of the same rank.
    pub(crate) read_uids: BTreeSet<u32>,
}

/// Selects users with files.
#[derive(Debug)]
pub(crate) struct FileUsers {
    /// `None` if no accounts can be looked up.
    accounts: Option<Accounts>,
    has_omitted: bool,
}

impl FileUsers {
    pub(crate) fn new() -> Self {
        let accounts = Accounts::new()
            .inspect_err(|e| tracing::warn!("accounts cannot be looked up: {e}"))
            .ok();
        Self {
            accounts,
            has_omitted: false,
        }
    }

    /// Returns at most [`FILE_USERS_MAX`] of the users with files. Does not wait for lookups.
    pub(crate) fn select(&mut self, users: BTreeSet<u32>, known: &KnownUsers) -> BTreeSet<u32> {
        let had_omitted = std::mem::replace(&mut self.has_omitted, users.len() > FILE_USERS_MAX);
        if !self.has_omitted {
            if let Some(accounts) = self.accounts.as_mut().filter(|_| had_omitted) {
                accounts.forget();
            }
            return users;
        }
        let names = known.preferred_names.iter().cloned();
        let keys = names
            .map(AccountKey::Name)
            .chain(users.iter().copied().map(AccountKey::Uid))
            .collect();
        let answers = self.accounts.as_mut().map(|a| a.answers(keys));
        let answers = answers.unwrap_or_default();
        let mut preferred_uids = known.preferred_uids.clone();
        for (key, answer) in &answers {
            if let (AccountKey::Name(_), AccountAnswer::Found(uid)) = (key, answer) {
                preferred_uids.insert(*uid);
            }
        }
        let rank = |uid: u32| match answers.get(&AccountKey::Uid(uid)) {
            _ if preferred_uids.contains(&uid) => UserRank::Preferred,
            Some(AccountAnswer::Found(_)) => UserRank::HasAccount,
            Some(AccountAnswer::NotFound) => UserRank::NoAccount,
            Some(AccountAnswer::Failed) | None => UserRank::Unknown,
        };
        let mut ranked_users: Vec<(UserRank, bool, u32)> = users
            .into_iter()
            .map(|uid| (rank(uid), !known.read_uids.contains(&uid), uid))
            .collect();
        ranked_users.sort_unstable();
        ranked_users.truncate(FILE_USERS_MAX);
        ranked_users.into_iter().map(|(.., uid)| uid).collect()
    }

    /// True if the last selection has omitted users.
    pub(crate) fn has_omitted(&self) -> bool {
        self.has_omitted
    }

    /// Returns a descriptor that is readable when a new selection may differ.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.accounts.as_ref().map(Accounts::fd)
    }

    /// Returns true if a new selection may differ, and accounts were looked up since the last call.
    pub(crate) fn take_answer_event(&self) -> bool {
        let has_answers = |accounts: &Accounts| accounts.take_answer_event();
        self.accounts.as_ref().is_some_and(has_answers) && self.has_omitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, poll};
    use std::sync::mpsc;

    /// Lowest subordinate uid of another user.
    const FOREIGN_UID: u32 = 100_000;
    /// Uid of a directory account.
    const OLGA_UID: u32 = 200_000_000;

    fn foreign_users() -> BTreeSet<u32> {
        (FOREIGN_UID..FOREIGN_UID + 2 * FILE_USERS_MAX as u32).collect()
    }

    fn users_with(look_up: impl Fn(&AccountKey) -> AccountAnswer + Send + 'static) -> FileUsers {
        FileUsers {
            accounts: Some(Accounts::with_lookup(Box::new(look_up)).expect("a descriptor")),
            has_omitted: false,
        }
    }

    /// Selects until the owner is selected.
    fn wait_until_selected(file_users: &mut FileUsers, users: &BTreeSet<u32>, known: &KnownUsers) {
        while !file_users.select(users.clone(), known).contains(&OLGA_UID) {
            let fd = file_users.fd().expect("accounts are looked up");
            let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
            assert_eq!(poll(&mut fds, 20_000_u16), Ok(1), "the owner is silenced");
            assert!(file_users.take_answer_event());
        }
    }

    #[test]
    fn no_account_is_looked_up_for_few_users() {
        let mut file_users = users_with(|key| panic!("{key:?} needs no lookup"));
        let users: BTreeSet<u32> = (0..FILE_USERS_MAX as u32).collect();
        let selected = file_users.select(users.clone(), &KnownUsers::default());
        assert_eq!(selected, users);
        assert!(!file_users.has_omitted());
    }

    /// Files of many uids without an account do not displace the file of a user with one.
    #[test]
    fn uids_without_account_displace_nobody() {
        let mut file_users = users_with(|key| match key {
            AccountKey::Uid(OLGA_UID) => AccountAnswer::Found(OLGA_UID),
            _ => AccountAnswer::NotFound,
        });
        let mut users = foreign_users();
        users.insert(OLGA_UID);
        let known = KnownUsers::default();
        wait_until_selected(&mut file_users, &users, &known);
        assert_eq!(file_users.select(users, &known).len(), FILE_USERS_MAX);
        assert!(file_users.has_omitted());
        let few_users: BTreeSet<u32> = [7].into();
        assert_eq!(file_users.select(few_users.clone(), &known), few_users);
        assert!(!file_users.has_omitted());
    }

    /// While accounts cannot be looked up, no selection waits. Root, the user of the virtual
    /// machine and users whose files are in force keep their places.
    #[test]
    fn known_users_keep_their_places_without_lookups() {
        let (_sender, never) = mpsc::channel::<AccountAnswer>();
        let mut hanging_users = users_with(move |_| never.recv().unwrap_or(AccountAnswer::Failed));
        let mut failing_users = users_with(|_| AccountAnswer::Failed);
        let mut no_accounts = FileUsers {
            accounts: None,
            has_omitted: false,
        };
        let mut users = foreign_users();
        users.extend([0, OLGA_UID, OLGA_UID + 1]);
        let known = KnownUsers {
            preferred_uids: [0, OLGA_UID].into(),
            read_uids: [OLGA_UID + 1].into(),
            ..KnownUsers::default()
        };
        for file_users in [&mut hanging_users, &mut failing_users, &mut no_accounts] {
            let selected = file_users.select(users.clone(), &known);
            assert_eq!(selected.len(), FILE_USERS_MAX);
            assert!(
                [0, OLGA_UID, OLGA_UID + 1]
                    .iter()
                    .all(|u| selected.contains(u))
            );
        }
    }

    /// An owner whom the administrator has named is selected before any uid is looked up, and among
    /// very many accounts.
    #[test]
    fn named_owner_precedes_other_accounts() {
        let (_sender, never) = mpsc::channel::<AccountAnswer>();
        let mut file_users = users_with(move |key| match key {
            AccountKey::Name(_) => AccountAnswer::Found(OLGA_UID),
            AccountKey::Uid(_) => never.recv().unwrap_or(AccountAnswer::Failed),
        });
        let mut users = foreign_users();
        users.insert(OLGA_UID);
        let known = KnownUsers {
            preferred_names: ["olga".to_string()].into(),
            ..KnownUsers::default()
        };
        wait_until_selected(&mut file_users, &users, &known);
        let mut file_users = users_with(|key| match key {
            AccountKey::Name(_) => AccountAnswer::Found(OLGA_UID),
            AccountKey::Uid(uid) => AccountAnswer::Found(*uid),
        });
        wait_until_selected(&mut file_users, &users, &known);
    }
}
