//! The policy in force on this host, merged from all its sources: the overrides and published
//! policies of owners, the administrator's file, and the file and the defaults of the user of the
//! virtual machine.
//!
//! Priority, highest first:
//!
//! 1. The owners. They have equal rights, so of each setting the most restrictive value is used.
//!    For each owner, the override has priority over the published policy.
//! 2. The administrator's file.
//! 3. The override, the published policy and the file of the user of the virtual machine, then the
//!    user's defaults. If this user is an owner of the host, the first three have the priority of
//!    an owner's.
//!
//! The user of the virtual machine is an owner if the user is root, if the administrator has named
//! the user, or if the administrator has named no owners and the user is among the last users
//! logged in at the machine itself.
//!
//! A malformed file is refused, and its previous content stays in force. If there was no previous
//! content, it is unknown what the file forbids, so guests may not run until the file is corrected
//! or removed.

use crate::owner::UserOverride;
use crate::owner_override;
use crate::policy::{BlockedUser, MergedPolicy, Policy, PolicyError};
use crate::published_policy::{self, PolicyRejection};
use nix::errno::Errno;
use nix::unistd::{Uid, User};
use sempa_proto::load::Login;
use sempa_proto::text::truncate;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Path of the administrator's policy.
pub const ADMIN_FILE: &str = "/etc/sempa/owner.toml";

/// Maximum number of blocked users without an account on this host that are reported.
const UNKNOWN_USERS_MAX: usize = 16;
/// Maximum size in bytes of the reported name of a blocked user without an account.
const UNKNOWN_NAME_BYTES_MAX: usize = 64;

/// Paths of the sources of the policy.
#[derive(Clone, Debug)]
pub struct PolicyPaths {
    /// Policy file of the user of the virtual machine.
    pub user: PathBuf,
    pub admin: PathBuf,
    /// Directory of the owners' overrides and published policies.
    pub overrides: PathBuf,
}

#[derive(Clone, Debug, Default)]
pub struct VmUser {
    pub uid: u32,
    pub name: String,
    /// Default settings that the user requests in addition to the policy file.
    pub defaults: Policy,
}

/// The sources of the policy, and the result of merging them.
#[derive(Debug)]
pub struct HostPolicy {
    paths: PolicyPaths,
    vm_user: VmUser,
    user_policy: Policy,
    admin_policy: Policy,
    overrides: Vec<UserOverride>,
    /// Valid published policies, by uid of the owner.
    published_policies: BTreeMap<u32, Policy>,
    /// Users who were last seen logged in at the machine itself, by name.
    local_users: BTreeSet<String>,
    /// Errors in sentences, by source ("admin", "own", …).
    errors: BTreeMap<&'static str, Vec<String>>,
    /// Errors in published policies of users without a previous valid policy, by uid.
    invalid_published: BTreeMap<u32, String>,
    /// The reason why no guest may run: a file in force is malformed and had no valid content
    /// before. `None` if the policy is known.
    policy_unknown: Option<String>,
    merged_policy: MergedPolicy,
    blocked_uids: Vec<u32>,
    /// Sentences about blocked users without an account on this host.
    unknown_users: Vec<String>,
}

/// Returns the path of the user's policy file below the home directory `home`.
pub fn user_policy_file(home: &Path) -> PathBuf {
    home.join(".config/sempa/owner.toml")
}

/// Returns the path of an administrator's file or directory: the path `named` in the environment,
/// or the default path `default_path`.
///
/// Root may name any path. If other users could do so, the user of a virtual machine could disable
/// the administrator's settings; they may only name a path that belongs to root and that no other
/// user can change. If the named path is not accepted, returns `default_path`, with a sentence that
/// gives the reason. `by` is the user who named the path.
pub fn trusted_path(named: PathBuf, default_path: &Path, by: Uid) -> (PathBuf, Option<String>) {
    let of_root = |path: &Path| {
        let metadata = path.symlink_metadata();
        // In a directory with the sticky bit, users cannot change the files of other users.
        let is_protected =
            |mode: u32, folder: bool| mode & 0o022 == 0 || (folder && mode & 0o1000 != 0);
        metadata
            .is_ok_and(|a| !a.is_symlink() && a.uid() == 0 && is_protected(a.mode(), a.is_dir()))
    };
    if named == default_path || by.is_root() || of_root(&named) {
        return (named, None);
    }
    let (named, other) = (named.display(), default_path.display());
    let sentence = format!(
        "{named} is not used, because it does not belong to root, or other users can change it; {other} is used"
    );
    (default_path.to_path_buf(), Some(sentence))
}

/// True for a login at the machine itself: at a console, or in a desktop on a screen of the
/// machine.
fn is_at_machine(login: &Login) -> bool {
    let of_display = |text: &str| {
        text.strip_prefix(':')
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    login.from.is_empty() || login.from == login.line || of_display(&login.from)
}

/// Returns the name of a user, or the uid as text if there is no account.
pub fn user_name(uid: u32) -> String {
    User::from_uid(Uid::from_raw(uid))
        .ok()
        .flatten()
        .map_or_else(|| uid.to_string(), |user| user.name)
}

/// A blocked user has no uid on this host. The rest of the policy file stays valid: a removed
/// account must not admit all other blocked users.
#[derive(Debug, Error)]
#[error("{place}: blocked user {name:?}: {cause}; the entry has no effect")]
struct UnknownUser {
    place: String,
    /// The beginning of the name.
    name: String,
    #[source]
    cause: AccountError,
}

#[derive(Debug, Error)]
enum AccountError {
    #[error("no account of this host has this name")]
    NoAccount,
    #[error("the accounts of this host cannot be read: {}", .0.desc())]
    Unreadable(#[source] Errno),
}

/// Returns the uid of a blocked user.
///
/// # Errors
/// No account on this host has this name, or the accounts cannot be read.
fn blocked_uid(user: &BlockedUser) -> Result<u32, UnknownUser> {
    let cause = match User::from_name(&user.name) {
        Ok(Some(user)) => return Ok(user.uid.as_raw()),
        Ok(None) => AccountError::NoAccount,
        Err(error) => AccountError::Unreadable(error),
    };
    user.name.parse().map_err(|_| UnknownUser {
        place: user.source.to_string(),
        name: truncate(&user.name, UNKNOWN_NAME_BYTES_MAX).to_string(),
        cause,
    })
}

/// Returns the report about a refused file. `had_content` is true if the file had valid content
/// before, `counts` if its content would be in force.
fn refusal_report(sentence: &str, had_content: bool, counts: bool) -> String {
    let then = match (had_content, counts) {
        (true, _) => "the previous content stays in force",
        (false, true) => "until it is corrected no guest is welcome here",
        (false, false) => "it has no effect here",
    };
    format!("{sentence}; {then}")
}

/// Why a policy file was refused. Its previous content stays in force.
#[derive(Debug, Error)]
enum LoadPolicyError {
    #[error(transparent)]
    Malformed(PolicyError),
    #[error("{name} cannot be read: {source}")]
    Read { name: String, source: io::Error },
}

/// Loads a policy file; returns an empty policy if the file does not exist. `parse` gets the file's
/// name and its text.
fn load_policy(
    path: &Path,
    parse: fn(&str, &str) -> Result<Policy, PolicyError>,
) -> Result<Policy, LoadPolicyError> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text).map_err(LoadPolicyError::Malformed),
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(Policy::default())
        }
        Err(source) => Err(LoadPolicyError::Read { name, source }),
    }
}

impl HostPolicy {
    /// Reads all sources of the policy and merges them.
    pub fn read(places: PolicyPaths, user: VmUser) -> HostPolicy {
        let mut rules = HostPolicy {
            paths: places,
            vm_user: user,
            user_policy: Policy::default(),
            admin_policy: Policy::default(),
            overrides: Vec::new(),
            published_policies: BTreeMap::new(),
            local_users: BTreeSet::new(),
            errors: BTreeMap::new(),
            invalid_published: BTreeMap::new(),
            policy_unknown: None,
            merged_policy: MergedPolicy::default(),
            blocked_uids: Vec::new(),
            unknown_users: Vec::new(),
        };
        rules.read_admin();
        rules.read_user_policy();
        rules.read_overrides();
        rules
    }

    /// Reads the file of the user of the virtual machine again. Returns an error in the file as a
    /// sentence.
    pub fn read_user_policy(&mut self) -> Option<String> {
        let read = load_policy(&self.paths.user, Policy::parse_own);
        self.apply_read("own", read, |rules| &mut rules.user_policy)
    }

    /// Reads the administrator's file again. Returns an error in the file as a sentence.
    pub fn read_admin(&mut self) -> Option<String> {
        let read = load_policy(&self.paths.admin, Policy::parse);
        self.apply_read("admin", read, |rules| &mut rules.admin_policy)
    }

    fn apply_read(
        &mut self,
        which: &'static str,
        read: Result<Policy, LoadPolicyError>,
        part: fn(&mut HostPolicy) -> &mut Policy,
    ) -> Option<String> {
        let wrong = match read {
            Ok(policy) => {
                *part(self) = policy;
                self.errors.remove(which);
                None
            }
            Err(error) => {
                let sentence = refusal_report(&error.to_string(), !part(self).is_empty(), true);
                self.errors.insert(which, vec![sentence.clone()]);
                Some(sentence)
            }
        };
        self.merge();
        wrong
    }

    /// Reads the owners' overrides and published policies again. Returns the errors in them as
    /// sentences.
    pub fn read_overrides(&mut self) -> Vec<String> {
        let (words, mut wrong) = owner_override::read_all(&self.paths.overrides);
        self.overrides = words
            .into_iter()
            .map(|(uid, word)| UserOverride {
                uid,
                user: user_name(uid),
                owner_override: word,
            })
            .collect();
        let mut before = std::mem::take(&mut self.published_policies);
        self.invalid_published.clear();
        for (uid, read) in published_policy::read_all(&self.paths.overrides) {
            let policy = match read {
                Ok(policy) => Some(policy),
                Err(PolicyRejection::Untrusted(sentence)) => {
                    wrong.push(sentence);
                    None
                }
                Err(PolicyRejection::Malformed(error)) => {
                    let said = before.remove(&uid).filter(|policy| !policy.is_empty());
                    if said.is_none() {
                        self.invalid_published
                            .insert(uid, refusal_report(&error.to_string(), false, true));
                    }
                    wrong.push(refusal_report(
                        &error.to_string(),
                        said.is_some(),
                        self.uses_published_policy(uid),
                    ));
                    said
                }
            };
            self.published_policies
                .extend(policy.map(|policy| (uid, policy)));
        }
        self.errors.insert("words", wrong.clone());
        self.merge();
        wrong
    }

    /// Updates the users who are logged in at the machine itself. If the administrator has named no
    /// owners, these users count as owners until other users log in at the machine.
    pub fn update_logins(&mut self, logins: &[Login]) {
        let at_machine = logins.iter().filter(|login| is_at_machine(login));
        let seated: BTreeSet<String> = at_machine.map(|login| login.user.clone()).collect();
        if !seated.is_empty() && seated != self.local_users {
            self.local_users = seated;
            self.merge();
        }
    }

    /// True if the settings of this user have the priority of an owner's.
    fn is_owner(&self, uid: u32) -> bool {
        let name = if uid == self.vm_user.uid {
            self.vm_user.name.clone()
        } else {
            user_name(uid)
        };
        let seated = || uid != self.vm_user.uid || self.local_users.contains(&name);
        uid == 0
            || self
                .admin_policy
                .owners
                .as_ref()
                .map_or_else(seated, |owners| owners.contains(&name))
    }

    /// True if a published policy of this user is used: that of an owner, or of the user of the
    /// virtual machine.
    fn uses_published_policy(&self, uid: u32) -> bool {
        uid == self.vm_user.uid || self.is_owner(uid)
    }

    /// Merges the override and the published policy of a user. For the user of the virtual machine,
    /// the policy file is merged, too.
    fn merged_of_user(&self, uid: u32) -> MergedPolicy {
        let word = self
            .overrides
            .iter()
            .find(|spoken| spoken.uid == uid)
            .map(|spoken| &spoken.owner_override.policy);
        let word = word.map(|policy| ("pvm owner".to_string(), policy));
        let published = published_policy::policy_file(&self.paths.overrides, uid)
            .display()
            .to_string();
        let published = self
            .published_policies
            .get(&uid)
            .map(|policy| (published, policy));
        let own = (uid == self.vm_user.uid)
            .then(|| (self.paths.user.display().to_string(), &self.user_policy));
        MergedPolicy::from_priority_list(word.into_iter().chain(published).chain(own))
    }

    fn merge(&mut self) {
        let said = self
            .overrides
            .iter()
            .map(|spoken| spoken.uid)
            .chain(self.published_policies.keys().copied());
        let said: BTreeSet<u32> = said.chain([self.vm_user.uid]).collect();
        let owners: Vec<u32> = said.into_iter().filter(|uid| self.is_owner(*uid)).collect();
        let all = owners.iter().map(|uid| self.merged_of_user(*uid));
        let of_owners = all.reduce(MergedPolicy::restrict_by).unwrap_or_default();
        let admin = MergedPolicy::from_priority_list([(
            self.paths.admin.display().to_string(),
            &self.admin_policy,
        )]);
        let wishes = MergedPolicy::from_priority_list([(
            "the user of the virtual machine".to_string(),
            &self.vm_user.defaults,
        )]);
        let user = if owners.contains(&self.vm_user.uid) {
            MergedPolicy::default()
        } else {
            self.merged_of_user(self.vm_user.uid)
        };
        self.merged_policy = of_owners.fill_from(admin).fill_from(user).fill_from(wishes);
        self.look_up_blocked();
        let files = [("admin", &self.admin_policy), ("own", &self.user_policy)]
            .into_iter()
            .filter(|(_, said)| said.is_empty());
        let mut silent = files.filter_map(|(which, _)| self.errors.get(which)?.first());
        let mut unheard = self
            .invalid_published
            .iter()
            .filter(|(uid, _)| self.uses_published_policy(**uid))
            .map(|(_, why)| why);
        self.policy_unknown = silent.next().or_else(|| unheard.next()).cloned();
    }

    /// Determines the uids of the blocked users from their names.
    fn look_up_blocked(&mut self) {
        (self.blocked_uids, self.unknown_users) = (Vec::new(), Vec::new());
        for user in self
            .merged_policy
            .policy
            .blocked
            .iter()
            .flat_map(|blocked| &blocked.users)
            .flatten()
        {
            match blocked_uid(user) {
                Ok(uid) => self.blocked_uids.push(uid),
                Err(unknown) => self.unknown_users.push(unknown.to_string()),
            }
        }
        self.unknown_users.truncate(UNKNOWN_USERS_MAX);
    }

    /// Returns the merged policy with the origin of each setting.
    pub fn merged(&self) -> &MergedPolicy {
        &self.merged_policy
    }

    /// Returns the uids of the blocked users. Users without an account on this host are omitted;
    /// [`HostPolicy::errors`] reports them.
    pub fn blocked_uids(&self) -> &[u32] {
        &self.blocked_uids
    }

    /// Returns the reason why no guest may run, whatever the other sources contain: a malformed
    /// file that had no valid content before. `None` if the policy is known.
    pub fn policy_unknown(&self) -> Option<&str> {
        self.policy_unknown.as_deref()
    }

    pub fn overrides(&self) -> &[UserOverride] {
        &self.overrides
    }

    /// Returns the users whom the administrator has named as owners; `None` if no owners are named.
    pub fn owners(&self) -> Option<&[String]> {
        self.admin_policy.owners.as_deref()
    }

    /// Returns all errors, one sentence each: refused files, and blocked users without an account
    /// on this host.
    pub fn errors(&self) -> Vec<String> {
        self.errors
            .values()
            .flatten()
            .chain(&self.unknown_users)
            .cloned()
            .collect()
    }

    /// True if the decision about guests depends on the time of day.
    pub fn depends_on_clock(&self) -> bool {
        self.merged_policy.policy.forbidden_hours.is_some()
            || self.merged_policy.policy.allowed_hours.is_some()
    }
}

#[cfg(test)]
mod tests;
