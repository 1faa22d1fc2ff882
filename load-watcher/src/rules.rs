//! The policy as it holds now: the owners' words and policies, the administrator's file, the file and the wishes of the user of
//! the virtual machine, read where they are. A file that is wrong is refused, and what it said before stays. If it said nothing
//! before, nobody knows what it forbids, and no guest is welcome until it is right, or gone.
//!
//! Owners come first. Several owners have the same right: what any of them does not want is not done. Of each owner his word
//! counts before the policy that he has published. The user of the virtual machine asks for something, so what he says comes
//! last, behind the administrator's file, unless he is an owner of this machine himself: the administrator has named him, or
//! nobody is named and he is the one who was last logged in at the machine itself. Root always is.

use crate::owner::Spoken;
use crate::policy::{BlockedUser, Merged, Policy, PolicyError};
use crate::published::{self, Wrong};
use crate::word;
use nix::unistd::{Uid, User};
use sempa_proto::load::Login;
use sempa_proto::text::cut;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The administrator's file.
pub const ADMIN_FILE: &str = "/etc/sempa/owner.toml";

/// Blocked users of whom it is told that nobody here has that name, at most.
const UNKNOWN_MAX: usize = 16;
/// Bytes of such a name that are told.
const NAME_BYTES_MAX: usize = 64;

/// Where the parts of the policy are.
#[derive(Clone, Debug)]
pub struct Places {
    /// The file of the user of the virtual machine.
    pub own: PathBuf,
    /// The administrator's file.
    pub admin: PathBuf,
    /// The folder of the owners' words and policies.
    pub words: PathBuf,
}

/// The user of the virtual machine.
#[derive(Clone, Debug, Default)]
pub struct VmUser {
    /// His number.
    pub uid: u32,
    /// His name.
    pub name: String,
    /// What he asks for besides his file.
    pub wishes: Policy,
}

/// The parts, and what they come to.
#[derive(Debug)]
pub struct Rules {
    places: Places,
    user: VmUser,
    own: Policy,
    admin: Policy,
    words: Vec<Spoken>,
    /// What owners have published.
    policies: BTreeMap<u32, Policy>,
    /// Who was last logged in at the machine itself.
    seated: BTreeSet<String>,
    wrong: BTreeMap<&'static str, Vec<String>>,
    /// What is wrong with the policies of users who had published nothing before.
    unheard: BTreeMap<u32, String>,
    /// Why no guest is welcome: a file that counts is wrong, and said nothing before.
    shut: Option<String>,
    merged: Merged,
    blocked: Vec<u32>,
    /// What is told of blocked users whom nobody knows here.
    unknown: Vec<String>,
}

/// The file of a user whose home is this.
pub fn owner_file(home: &Path) -> PathBuf {
    home.join(".config/sempa/owner.toml")
}

/// The place of what the administrator says, if another one was named in the environment. Only root may name any: otherwise the
/// user of a virtual machine could have what is said there not count. Others may name what belongs to root and nobody else can
/// change. With a sentence if it does not count.
pub fn trusted(named: PathBuf, usual: &Path, by: Uid) -> (PathBuf, Option<String>) {
    let of_root = |path: &Path| {
        let about = path.symlink_metadata();
        // In a folder with the sticky bit nobody can change what is another's.
        let kept = |mode: u32, folder: bool| mode & 0o022 == 0 || (folder && mode & 0o1000 != 0);
        about.is_ok_and(|a| !a.is_symlink() && a.uid() == 0 && kept(a.mode(), a.is_dir()))
    };
    if named == usual || by.is_root() || of_root(&named) {
        return (named, None);
    }
    let (named, other) = (named.display(), usual.display());
    let sentence = format!(
        "{named} does not count, because it is not root's, or others can change it; {other} counts"
    );
    (usual.to_path_buf(), Some(sentence))
}

/// True for a login at the machine itself: at a console, or in a desktop on a screen of it.
fn is_at_machine(login: &Login) -> bool {
    let of_display = |text: &str| {
        text.strip_prefix(':')
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    login.from.is_empty() || login.from == login.line || of_display(&login.from)
}

/// Name of a user, or the number where there is none.
pub fn user_name(uid: u32) -> String {
    User::from_uid(Uid::from_raw(uid))
        .ok()
        .flatten()
        .map_or_else(|| uid.to_string(), |user| user.name)
}

/// Number of a blocked user, or what is told of one whom nobody knows here. The rest of his file counts: an account that is removed
/// must not open the host to all others who are blocked.
fn uid_of(user: &BlockedUser) -> Result<u32, String> {
    let BlockedUser { name, place, .. } = user;
    let why = match User::from_name(name) {
        Ok(Some(user)) => return Ok(user.uid.as_raw()),
        Ok(None) => "no account of this host has this name".to_string(),
        Err(error) => format!("the accounts of this host cannot be read: {}", error.desc()),
    };
    let told = cut(name, NAME_BYTES_MAX);
    name.parse()
        .map_err(|_| format!("{place}: blocked user {told:?}: {why}; nobody is kept away by it"))
}

/// What is told of a file that does not count. `said`: it said something before. `counts`: what it says would count.
fn refused(sentence: &str, said: bool, counts: bool) -> String {
    let then = match (said, counts) {
        (true, _) => "what was said before stays",
        (false, true) => "until that is mended no guest is welcome here",
        (false, false) => "it would count for nothing here",
    };
    format!("{sentence}; {then}")
}

/// What a file says; nothing when it does not exist.
fn load(
    path: &Path,
    parse: fn(&str, &str) -> Result<Policy, PolicyError>,
) -> Result<Policy, String> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text).map_err(|error| error.to_string()),
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(Policy::default())
        }
        Err(e) => Err(format!("{name} cannot be read: {e}")),
    }
}

impl Rules {
    /// Reads everything.
    pub fn read(places: Places, user: VmUser) -> Rules {
        let mut rules = Rules {
            places,
            user,
            own: Policy::default(),
            admin: Policy::default(),
            words: Vec::new(),
            policies: BTreeMap::new(),
            seated: BTreeSet::new(),
            wrong: BTreeMap::new(),
            unheard: BTreeMap::new(),
            shut: None,
            merged: Merged::default(),
            blocked: Vec::new(),
            unknown: Vec::new(),
        };
        rules.read_admin();
        rules.read_own();
        rules.read_words();
        rules
    }

    /// Reads the file of the user of the virtual machine again. Answers what is wrong with it.
    pub fn read_own(&mut self) -> Option<String> {
        let read = load(&self.places.own, Policy::parse_own);
        self.take("own", read, |rules| &mut rules.own)
    }

    /// Reads the administrator's file again. Answers what is wrong with it.
    pub fn read_admin(&mut self) -> Option<String> {
        let read = load(&self.places.admin, Policy::parse);
        self.take("admin", read, |rules| &mut rules.admin)
    }

    fn take(
        &mut self,
        which: &'static str,
        read: Result<Policy, String>,
        part: fn(&mut Rules) -> &mut Policy,
    ) -> Option<String> {
        let wrong = match read {
            Ok(policy) => {
                *part(self) = policy;
                self.wrong.remove(which);
                None
            }
            Err(sentence) => {
                let sentence = refused(&sentence, !part(self).is_empty(), true);
                self.wrong.insert(which, vec![sentence.clone()]);
                Some(sentence)
            }
        };
        self.merge();
        wrong
    }

    /// Reads the owners' words and policies again. Answers what is wrong with them.
    pub fn read_words(&mut self) -> Vec<String> {
        let (words, mut wrong) = word::read_all(&self.places.words);
        self.words = words
            .into_iter()
            .map(|(uid, word)| Spoken {
                uid,
                user: user_name(uid),
                word,
            })
            .collect();
        let mut before = std::mem::take(&mut self.policies);
        self.unheard.clear();
        for (uid, read) in published::read_all(&self.places.words) {
            let policy = match read {
                Ok(policy) => Some(policy),
                Err(Wrong::Doubted(sentence)) => {
                    wrong.push(sentence);
                    None
                }
                Err(Wrong::Refused(error)) => {
                    let said = before.remove(&uid).filter(|policy| !policy.is_empty());
                    if said.is_none() {
                        self.unheard
                            .insert(uid, refused(&error.to_string(), false, true));
                    }
                    wrong.push(refused(
                        &error.to_string(),
                        said.is_some(),
                        self.counts(uid),
                    ));
                    said
                }
            };
            self.policies.extend(policy.map(|policy| (uid, policy)));
        }
        self.wrong.insert("words", wrong.clone());
        self.merge();
        wrong
    }

    /// These are logged in. Who is at the machine itself counts as its owner until others are, if nobody is named.
    pub fn see(&mut self, logins: &[Login]) {
        let at_machine = logins.iter().filter(|login| is_at_machine(login));
        let seated: BTreeSet<String> = at_machine.map(|login| login.user.clone()).collect();
        if !seated.is_empty() && seated != self.seated {
            self.seated = seated;
            self.merge();
        }
    }

    /// True if what this user says counts as the owner's.
    fn is_owner(&self, uid: u32) -> bool {
        let name = if uid == self.user.uid {
            self.user.name.clone()
        } else {
            user_name(uid)
        };
        let seated = || uid != self.user.uid || self.seated.contains(&name);
        uid == 0
            || self
                .admin
                .owners
                .as_ref()
                .map_or_else(seated, |owners| owners.contains(&name))
    }

    /// True if what this user publishes counts, as an owner's or as that of the user of the virtual machine.
    fn counts(&self, uid: u32) -> bool {
        uid == self.user.uid || self.is_owner(uid)
    }

    /// What one user has said, published, and, if he is the one of the virtual machine, has in his file.
    fn said_by(&self, uid: u32) -> Merged {
        let word = self
            .words
            .iter()
            .find(|spoken| spoken.uid == uid)
            .map(|spoken| &spoken.word.policy);
        let word = word.map(|policy| ("pvm owner".to_string(), policy));
        let published = published::policy_file(&self.places.words, uid)
            .display()
            .to_string();
        let published = self.policies.get(&uid).map(|policy| (published, policy));
        let own =
            (uid == self.user.uid).then(|| (self.places.own.display().to_string(), &self.own));
        Merged::of(word.into_iter().chain(published).chain(own))
    }

    fn merge(&mut self) {
        let said = self
            .words
            .iter()
            .map(|spoken| spoken.uid)
            .chain(self.policies.keys().copied());
        let said: BTreeSet<u32> = said.chain([self.user.uid]).collect();
        let owners: Vec<u32> = said.into_iter().filter(|uid| self.is_owner(*uid)).collect();
        let all = owners.iter().map(|uid| self.said_by(*uid));
        let of_owners = all.reduce(Merged::and).unwrap_or_default();
        let admin = Merged::of([(self.places.admin.display().to_string(), &self.admin)]);
        let wishes = Merged::of([(
            "the user of the virtual machine".to_string(),
            &self.user.wishes,
        )]);
        let user = if owners.contains(&self.user.uid) {
            Merged::default()
        } else {
            self.said_by(self.user.uid)
        };
        self.merged = of_owners.or(admin).or(user).or(wishes);
        self.look_up();
        let files = [("admin", &self.admin), ("own", &self.own)]
            .into_iter()
            .filter(|(_, said)| said.is_empty());
        let mut silent = files.filter_map(|(which, _)| self.wrong.get(which)?.first());
        let mut unheard = self
            .unheard
            .iter()
            .filter(|(uid, _)| self.counts(**uid))
            .map(|(_, why)| why);
        self.shut = silent.next().or_else(|| unheard.next()).cloned();
    }

    /// Looks up who is blocked.
    fn look_up(&mut self) {
        (self.blocked, self.unknown) = (Vec::new(), Vec::new());
        for user in self
            .merged
            .policy
            .blocked
            .iter()
            .flat_map(|blocked| &blocked.users)
            .flatten()
        {
            match uid_of(user) {
                Ok(uid) => self.blocked.push(uid),
                Err(sentence) => self.unknown.push(sentence),
            }
        }
        self.unknown.truncate(UNKNOWN_MAX);
    }

    /// The policy, and where each part of it comes from.
    pub fn merged(&self) -> &Merged {
        &self.merged
    }

    /// Numbers of the users that it blocks; names that nobody has here are left out, and told with what is [`Rules::wrong`].
    pub fn blocked(&self) -> &[u32] {
        &self.blocked
    }

    /// Why no guest is welcome whatever else is said: a file that is wrong, and said nothing before.
    pub fn shut(&self) -> Option<&str> {
        self.shut.as_deref()
    }

    /// The owners' words.
    pub fn words(&self) -> &[Spoken] {
        &self.words
    }

    /// Users whose word counts, if the administrator has named them.
    pub fn owners(&self) -> Option<&[String]> {
        self.admin.owners.as_deref()
    }

    /// What was refused, files and names of blocked users, one sentence for each.
    pub fn wrong(&self) -> Vec<String> {
        self.wrong
            .values()
            .flatten()
            .chain(&self.unknown)
            .cloned()
            .collect()
    }

    /// True when what guests may do depends on the clock.
    pub fn has_hours(&self) -> bool {
        self.merged.policy.never.is_some() || self.merged.policy.only.is_some()
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
