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
//! `watch = false`, which ends the protection of owners, counts only if an owner or the
//! administrator has stated it, and if all owners with a statement have stated it.
//!
//! A malformed file is refused, and its previous content stays in force. If there was no previous
//! content, it is unknown what the file forbids, so guests may not run until the file is corrected
//! or removed.

use crate::file_users::{FileUsers, KnownUsers};
use crate::owner::UserOverride;
use crate::owner_override::{self, Drain, OVERRIDE_SUFFIX, ReadOverrides};
use crate::policy::{BlockedUser, MergedPolicy, Policy, PolicyError};
use crate::published_policy::{self, POLICY_SUFFIX, PublishedPolicyError};
use crate::status::PolicySetting;
use crate::user_files::{self, FILE_USERS_MAX, FileContent, ReadFile};
use nix::errno::Errno;
use nix::unistd::{Uid, User};
use sempa_proto::load::Login;
use sempa_proto::text::truncate;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
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
    pub user: UserPolicySource,
    pub admin: PathBuf,
    /// Directory that contains the owners' overrides and published policies.
    pub overrides: PathBuf,
}

#[derive(Clone, Debug, Default)]
pub struct VmUser {
    pub uid: u32,
    pub name: String,
    /// Settings from the environment variable `SEMPA_GUEST_DEFAULTS`. They apply where no policy
    /// file, published policy or override has a value.
    pub defaults: Policy,
}

/// The merged policy as other processes need it: what guests may use, and what users of the host
/// are told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySummary {
    /// Nice level of guests.
    pub nice: Option<u8>,
    /// Number of processors of guests.
    pub cores: Option<u32>,
    pub settings: Vec<PolicySetting>,
    /// Errors in refused files, as sentences.
    pub errors: Vec<String>,
    /// Versions of the overrides and published policies that are in force.
    pub read_files: Vec<ReadFile>,
    /// Source that ends the protection of owners; `None` if none does.
    pub switched_off_by: Option<String>,
}

/// The sources of the policy, and the result of merging them.
#[derive(Debug)]
pub struct HostPolicy {
    paths: PolicyPaths,
    vm_user: VmUser,
    user_policy: Policy,
    admin_policy: Policy,
    overrides: Vec<UserOverride>,
    /// The versions of the files with valid overrides and published policies.
    read_files: Vec<ReadFile>,
    /// Valid published policies, by uid of the owner.
    published_policies: BTreeMap<u32, Policy>,
    /// Selects the users whose overrides and published policies are read.
    file_users: FileUsers,
    /// Users who were last seen logged in at the machine itself, by name.
    local_users: BTreeSet<String>,
    /// Users who are logged in, at the machine or from elsewhere, by name.
    logged_in_users: BTreeSet<String>,
    /// Errors as sentences, by source: "admin", "own" (the file of the user of the virtual machine)
    /// or "words" (the overrides' directory).
    errors: BTreeMap<&'static str, Vec<String>>,
    /// Errors in published policies of users without a previous valid policy, by uid.
    invalid_published: BTreeMap<u32, String>,
    /// The reason why no guest may run: a file whose content would be in force is malformed and was
    /// never valid before. `None` if the policy is known.
    policy_unknown: Option<String>,
    merged_policy: MergedPolicy,
    /// The source that ends the protection of owners on this host; `None` if none does.
    switched_off_by: Option<String>,
    blocked_uids: Vec<u32>,
    /// Error sentences about blocked users without an account on this host.
    unknown_users: Vec<String>,
}

/// Returns the path of the user's policy file below the home directory `home`.
pub fn user_policy_file(home: &Path) -> PathBuf {
    home.join(".config/sempa/owner.toml")
}

/// Checks the path of an administrator's file or directory that the environment requests. Returns
/// `requested_path` if the path is accepted. Otherwise returns `default_path` and a sentence with
/// the reason.
///
/// Root may name any path. All other users may only name a path that belongs to root and that no
/// other user can change; otherwise the user of a virtual machine could disable the administrator's
/// settings. `requester_uid` is the uid of the user who named the path.
pub fn trusted_path(
    requested_path: PathBuf,
    default_path: &Path,
    requester_uid: Uid,
) -> (PathBuf, Option<String>) {
    let is_trusted = |path: &Path| {
        let metadata = path.symlink_metadata();
        // In a directory with the sticky bit, users cannot change the files of other users.
        let is_protected =
            |mode: u32, is_dir: bool| mode & 0o022 == 0 || (is_dir && mode & 0o1000 != 0);
        metadata
            .is_ok_and(|a| !a.is_symlink() && a.uid() == 0 && is_protected(a.mode(), a.is_dir()))
    };
    if requested_path == default_path || requester_uid.is_root() || is_trusted(&requested_path) {
        return (requested_path, None);
    }
    let (requested_path, default_text) = (requested_path.display(), default_path.display());
    let warning = format!(
        "{requested_path} is not used, because it does not belong to root, or other users can change it; {default_text} is used"
    );
    (default_path.to_path_buf(), Some(warning))
}

/// True for a login at the machine itself: at a console, or in a desktop on a screen of the
/// machine.
pub(crate) fn is_at_machine(login: &Login) -> bool {
    let is_display = |text: &str| {
        text.strip_prefix(':')
            .is_some_and(|display_number| display_number.starts_with(|c: char| c.is_ascii_digit()))
    };
    login.origin.is_empty() || login.origin == login.terminal || is_display(&login.origin)
}

/// Returns the name of a user, or the uid as text if there is no account.
pub fn user_name(uid: u32) -> String {
    User::from_uid(Uid::from_raw(uid))
        .ok()
        .flatten()
        .map_or_else(|| uid.to_string(), |account| account.name)
}

/// Error of a blocked user who has no account on this host. Only the entry of this user has no
/// effect: after an account is removed, all other blocked users must stay blocked.
#[derive(Debug, Error)]
#[error("{place}: blocked user {name:?}: {cause}; the entry has no effect")]
struct UnknownUser {
    place: String,
    /// The user's name from the policy, truncated to [`UNKNOWN_NAME_BYTES_MAX`] bytes.
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

/// Returns the uid of a blocked user who is given by name or by uid.
///
/// # Errors
/// The name is not a number, and no account on this host has it or the accounts cannot be read.
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

/// Returns the error `error_sentence` about a refused file, extended by the consequence for guests.
/// `had_content` is true if the file had valid content before; `is_in_force` is true if valid
/// content of the file would be in force.
fn refusal_report(error_sentence: &str, had_content: bool, is_in_force: bool) -> String {
    let consequence = match (had_content, is_in_force) {
        (true, _) => "the previous content stays in force",
        (false, true) => "until it is corrected no guest is welcome here",
        (false, false) => "it has no effect here",
    };
    format!("{error_sentence}; {consequence}")
}

/// The reason why a policy file was refused. The previous content of the file stays in force; if
/// there was none, no guest may run.
#[derive(Debug, Error)]
enum LoadPolicyError {
    #[error(transparent)]
    Malformed(PolicyError),
    #[error("{name} cannot be read: {cause}")]
    Read { name: String, cause: String },
}

impl HostPolicy {
    /// Reads all sources of the policy and merges them.
    pub fn read_and_merge(policy_paths: PolicyPaths, vm_user: VmUser) -> Self {
        let mut host_policy = Self {
            paths: policy_paths,
            vm_user,
            user_policy: Policy::default(),
            admin_policy: Policy::default(),
            overrides: Vec::new(),
            read_files: Vec::new(),
            published_policies: BTreeMap::new(),
            file_users: FileUsers::new(),
            local_users: BTreeSet::new(),
            logged_in_users: BTreeSet::new(),
            errors: BTreeMap::new(),
            invalid_published: BTreeMap::new(),
            policy_unknown: None,
            merged_policy: MergedPolicy::default(),
            switched_off_by: None,
            blocked_uids: Vec::new(),
            unknown_users: Vec::new(),
        };
        host_policy.read_admin_policy();
        host_policy.read_user_policy();
        host_policy.read_overrides();
        host_policy
    }

    /// Reads the file of the user of the virtual machine again. Returns an error in the file as a
    /// sentence.
    pub fn read_user_policy(&mut self) -> Option<String> {
        let load_result = self.paths.user.load();
        self.apply_load_result("own", load_result, |host_policy| {
            &mut host_policy.user_policy
        })
    }

    /// Replaces the content of the file of the user of the virtual machine. Returns an error in the
    /// file as a sentence.
    pub fn set_user_policy(&mut self, file: PolicyFile) -> Option<String> {
        self.paths.user = UserPolicySource::Received(file);
        self.read_user_policy()
    }

    /// Reads the administrator's file again. Returns an error in the file as a sentence.
    pub fn read_admin_policy(&mut self) -> Option<String> {
        let load_result = PolicyFile::read(&self.paths.admin).parse(Policy::parse);
        let error_sentence = self.apply_load_result("admin", load_result, |host_policy| {
            &mut host_policy.admin_policy
        });
        // The file may name other owners.
        self.read_omitted_overrides();
        error_sentence
    }

    fn apply_load_result(
        &mut self,
        source: &'static str,
        load_result: Result<Policy, LoadPolicyError>,
        policy_field: fn(&mut Self) -> &mut Policy,
    ) -> Option<String> {
        let error_sentence = match load_result {
            Ok(policy) => {
                *policy_field(self) = policy;
                self.errors.remove(source);
                None
            }
            Err(error) => {
                let sentence =
                    refusal_report(&error.to_string(), !policy_field(self).is_empty(), true);
                self.errors.insert(source, vec![sentence.clone()]);
                Some(sentence)
            }
        };
        self.merge_sources();
        error_sentence
    }

    /// Reads the owners' overrides and published policies again. Returns the errors in them as
    /// sentences.
    pub fn read_overrides(&mut self) -> Vec<String> {
        let users = self.select_file_users();
        let ReadOverrides {
            overrides,
            versions,
            errors: mut error_sentences,
        } = owner_override::read_all(&self.paths.overrides, &users);
        self.read_files = versions
            .into_iter()
            .map(|(uid, version)| ReadFile::new(uid, FileContent::Override, version))
            .collect();
        self.overrides = overrides
            .into_iter()
            .map(|(uid, declared_override)| UserOverride {
                uid,
                user: user_name(uid),
                owner_override: declared_override,
            })
            .collect();
        let mut previous_policies = std::mem::take(&mut self.published_policies);
        self.invalid_published.clear();
        for (uid, policy_result) in published_policy::read_all(&self.paths.overrides, &users) {
            let policy = match policy_result {
                Ok((policy, version)) => {
                    let read_file = ReadFile::new(uid, FileContent::Policy, version);
                    self.read_files.push(read_file);
                    Some(policy)
                }
                Err(PublishedPolicyError::Untrusted(error)) => {
                    error_sentences.push(error.to_string());
                    None
                }
                Err(PublishedPolicyError::Malformed(error)) => {
                    let previous_policy = previous_policies
                        .remove(&uid)
                        .filter(|policy| !policy.is_empty());
                    if previous_policy.is_none() {
                        self.invalid_published
                            .insert(uid, refusal_report(&error.to_string(), false, true));
                    }
                    error_sentences.push(refusal_report(
                        &error.to_string(),
                        previous_policy.is_some(),
                        self.uses_published_policy(uid),
                    ));
                    previous_policy
                }
            };
            self.published_policies
                .extend(policy.map(|policy| (uid, policy)));
        }
        if self.omits_users() {
            error_sentences.push(format!(
                "more than {FILE_USERS_MAX} users have files of owners in {}; only those of {FILE_USERS_MAX} are \
                 read, and uids without an account come last",
                self.paths.overrides.display()
            ));
        }
        self.errors.insert("words", error_sentences.clone());
        self.merge_sources();
        error_sentences
    }

    /// Returns the users whose overrides and published policies are read.
    fn select_file_users(&mut self) -> BTreeSet<u32> {
        let suffixes = [OVERRIDE_SUFFIX, POLICY_SUFFIX];
        let users = user_files::users_with_files(&self.paths.overrides, &suffixes);
        let owners = self.admin_policy.owners.iter().flatten();
        let preferred_names = owners
            .chain(&self.local_users)
            .chain(&self.logged_in_users)
            .cloned()
            .collect();
        let known_users = KnownUsers {
            preferred_uids: [0, self.vm_user.uid].into(),
            preferred_names,
            read_uids: self.read_files.iter().map(|file| file.uid).collect(),
        };
        self.file_users.select(users, &known_users)
    }

    /// Reads the overrides and published policies again if the last reading has omitted users.
    fn read_omitted_overrides(&mut self) {
        if self.omits_users() {
            self.read_overrides();
        }
    }

    /// True if the overrides and published policies of some users have no effect, because too many
    /// users have them.
    pub fn omits_users(&self) -> bool {
        self.file_users.has_omitted()
    }

    /// Returns a descriptor that becomes readable when the files of other users than before may be
    /// selected; see [`HostPolicy::take_file_users_event`].
    pub fn file_users_fd(&self) -> Option<BorrowedFd<'_>> {
        self.file_users.fd()
    }

    /// Returns true if the overrides and published policies must be read again, because more is
    /// known about the users who have them.
    pub fn take_file_users_event(&self) -> bool {
        self.file_users.take_answer_event()
    }

    /// Updates the users who are logged in. If the administrator has named no owners, those at the
    /// machine itself count as owners until other users log in at the machine.
    pub fn update_logins(&mut self, logins: &[Login]) {
        let logged_in_users = logins.iter().map(|login| login.user_name.clone()).collect();
        let previous_users = std::mem::replace(&mut self.logged_in_users, logged_in_users);
        if previous_users != self.logged_in_users {
            self.read_omitted_overrides();
        }
        let logins_at_machine = logins.iter().filter(|login| is_at_machine(login));
        let users_at_machine: BTreeSet<String> = logins_at_machine
            .map(|login| login.user_name.clone())
            .collect();
        if !users_at_machine.is_empty() && users_at_machine != self.local_users {
            self.local_users = users_at_machine;
            self.merge_sources();
        }
    }

    /// True if this user is an owner, so that the user's settings have priority over the
    /// administrator's.
    fn is_owner(&self, uid: u32) -> bool {
        let name = if uid == self.vm_user.uid {
            self.vm_user.name.clone()
        } else {
            user_name(uid)
        };
        let is_default_owner = || uid != self.vm_user.uid || self.local_users.contains(&name);
        uid == 0
            || self
                .admin_policy
                .owners
                .as_ref()
                .map_or_else(is_default_owner, |owners| owners.contains(&name))
    }

    /// True if the published policy of this user is used, because the user is an owner or the user
    /// of the virtual machine.
    fn uses_published_policy(&self, uid: u32) -> bool {
        uid == self.vm_user.uid || self.is_owner(uid)
    }

    /// Merges the override and the published policy of a user, and also the user's policy file if
    /// the user is the user of the virtual machine. The override has the highest priority, the file
    /// the lowest.
    fn merge_user_policies(&self, uid: u32) -> MergedPolicy {
        let override_source = self
            .overrides
            .iter()
            .find(|user_override| user_override.uid == uid)
            .map(|user_override| &user_override.owner_override.policy);
        let override_source = override_source.map(|policy| ("pvm owner".to_string(), policy));
        let published_source = published_policy::policy_file(&self.paths.overrides, uid)
            .display()
            .to_string();
        let published_source = self
            .published_policies
            .get(&uid)
            .map(|policy| (published_source, policy));
        let user_file_source =
            (uid == self.vm_user.uid).then(|| (self.paths.user.name(), &self.user_policy));
        MergedPolicy::from_priority_list(
            override_source
                .into_iter()
                .chain(published_source)
                .chain(user_file_source),
        )
    }

    fn merge_sources(&mut self) {
        let said = self
            .overrides
            .iter()
            .map(|user_override| user_override.uid)
            .chain(self.published_policies.keys().copied());
        let said: BTreeSet<u32> = said.chain([self.vm_user.uid]).collect();
        let owners: Vec<u32> = said.into_iter().filter(|uid| self.is_owner(*uid)).collect();
        let owner_policies = owners.iter().map(|uid| self.merge_user_policies(*uid));
        let owner_policy = owner_policies
            .reduce(MergedPolicy::restrict_by)
            .unwrap_or_default();
        let admin_policy = MergedPolicy::from_priority_list([(
            self.paths.admin.display().to_string(),
            &self.admin_policy,
        )]);
        let mut default_policy = MergedPolicy::from_priority_list([(
            "the user of the virtual machine".to_string(),
            &self.vm_user.defaults,
        )]);
        let mut user_policy = if owners.contains(&self.vm_user.uid) {
            MergedPolicy::default()
        } else {
            self.merge_user_policies(self.vm_user.uid)
        };
        default_policy.remove_watch();
        user_policy.remove_watch();
        self.switched_off_by = self.find_switch_off(&owners);
        self.merged_policy = owner_policy
            .fill_missing_from(admin_policy)
            .fill_missing_from(user_policy)
            .fill_missing_from(default_policy);
        self.look_up_blocked();
        let empty_sources = [("admin", &self.admin_policy), ("own", &self.user_policy)]
            .into_iter()
            .filter(|(_, said)| said.is_empty());
        let mut file_errors =
            empty_sources.filter_map(|(source, _)| self.errors.get(source)?.first());
        let mut published_errors = self
            .invalid_published
            .iter()
            .filter(|(uid, _)| self.uses_published_policy(**uid))
            .map(|(_, sentence)| sentence);
        self.policy_unknown = file_errors
            .next()
            .or_else(|| published_errors.next())
            .cloned();
    }

    /// Returns the source that ends the protection of owners. An owner who has stated anything else
    /// wants to be protected, but the administrator decides for the whole machine.
    fn find_switch_off(&self, owners: &[u32]) -> Option<String> {
        if self.drain().is_some() {
            return None;
        }
        if self.admin_policy.watch == Some(false) {
            return Some(self.paths.admin.display().to_string());
        }
        let declares_presence = |uid: &u32| {
            let mut overrides = self.overrides.iter();
            overrides.any(|said| said.uid == *uid && said.owner_override.presence.is_some())
        };
        let mut statements = owners.iter().filter_map(|uid| {
            let policy = self.merge_user_policies(*uid);
            let is_stated = !policy.settings.is_empty() || declares_presence(uid);
            is_stated.then_some(policy)
        });
        let first_source = statements.next()?.switch_off_source()?;
        statements
            .all(|policy| policy.switch_off_source().is_some())
            .then_some(first_source)
    }

    /// Returns the source that ends the protection of owners on this host; `None` if none does.
    pub fn switched_off_by(&self) -> Option<&str> {
        self.switched_off_by.as_deref()
    }

    /// Determines the uids of the blocked users from their names. Records an error sentence for
    /// each user without an account, at most [`UNKNOWN_USERS_MAX`] sentences.
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
                Err(error) => self.unknown_users.push(error.to_string()),
            }
        }
        self.unknown_users.truncate(UNKNOWN_USERS_MAX);
    }

    /// Returns the merged policy with the origin of each setting.
    pub fn merged_policy(&self) -> &MergedPolicy {
        &self.merged_policy
    }

    /// Returns the uids of the blocked users. Users without an account on this host are omitted;
    /// [`HostPolicy::errors`] reports them.
    pub fn blocked_uids(&self) -> &[u32] {
        &self.blocked_uids
    }

    /// Returns the reason why no guest may run: a file whose content would be in force is malformed
    /// and was never valid before. The content of all other sources is irrelevant then. `None` if
    /// the policy is known.
    pub fn policy_unknown(&self) -> Option<&str> {
        self.policy_unknown.as_deref()
    }

    /// Returns the versions of the overrides and published policies that are in force.
    pub fn read_files(&self) -> &[ReadFile] {
        &self.read_files
    }

    pub fn overrides(&self) -> &[UserOverride] {
        &self.overrides
    }

    /// Returns the administrator's statement that no guest may be on this machine; `None` if there
    /// is none. It has priority over all policies.
    pub fn drain(&self) -> Option<&Drain> {
        let mut overrides = self.overrides.iter();
        let of_root = overrides.find(|user_override| user_override.uid == 0)?;
        of_root.owner_override.drain.as_ref()
    }

    /// Returns the users whom the administrator has named as owners; `None` if no owners are named.
    pub fn owners(&self) -> Option<&[String]> {
        self.admin_policy.owners.as_deref()
    }

    /// Returns all errors in refused files, and an error for each blocked user without an account
    /// on this host. Each error is one sentence.
    pub fn errors(&self) -> Vec<String> {
        self.errors
            .values()
            .flatten()
            .chain(&self.unknown_users)
            .cloned()
            .collect()
    }

    /// Returns the part of the policy that other processes need.
    pub fn summary(&self) -> PolicySummary {
        let setting = |(name, value, origin): &(&str, String, String)| PolicySetting {
            name: name.to_string(),
            value: value.clone(),
            from: origin.clone(),
        };
        let MergedPolicy { policy, settings } = &self.merged_policy;
        PolicySummary {
            nice: policy.nice,
            cores: policy.cores,
            settings: settings.iter().map(setting).collect(),
            errors: self.errors(),
            read_files: self.read_files.clone(),
            switched_off_by: self.switched_off_by.clone(),
        }
    }

    /// True if the decision about guests depends on the time of day.
    pub fn depends_on_clock(&self) -> bool {
        self.merged_policy.policy.forbidden_hours.is_some()
            || self.merged_policy.policy.allowed_hours.is_some()
    }
}

mod policy_file;

pub use policy_file::{PolicyFile, PolicyFileContent, UserPolicySource};

#[cfg(test)]
mod tests;
