//! The policy as it holds now: the owner's file, the administrator's, the user's wishes and the owners' words, read where they
//! are. A file that is wrong is refused, and what it said before stays.

use crate::owner::Spoken;
use crate::policy::{Merged, Policy, PolicyError};
use crate::word;
use nix::unistd::{Uid, User};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// The administrator's file.
pub const ADMIN_FILE: &str = "/etc/sempa/owner.toml";

/// Where the parts of the policy are.
#[derive(Clone, Debug)]
pub struct Places {
    /// The owner's file.
    pub owner: PathBuf,
    /// The administrator's file.
    pub admin: PathBuf,
    /// The folder of the owners' words.
    pub words: PathBuf,
}

/// The parts, and what they come to.
#[derive(Debug)]
pub struct Rules {
    places: Places,
    owner: Policy,
    admin: Policy,
    user: Policy,
    words: Vec<Spoken>,
    wrong: BTreeMap<&'static str, Vec<String>>,
    merged: Merged,
    blocked: Vec<u32>,
}

/// The file of an owner whose home is this.
pub fn owner_file(home: &Path) -> PathBuf {
    home.join(".config/sempa/owner.toml")
}

/// Name of a user, or the number where there is none.
pub fn user_name(uid: u32) -> String {
    User::from_uid(Uid::from_raw(uid)).ok().flatten().map_or_else(|| uid.to_string(), |user| user.name)
}

fn uid_of(name: &str) -> Option<u32> {
    let known = User::from_name(name).ok().flatten().map(|user| user.uid.as_raw());
    known.or_else(|| name.parse().ok())
}

/// What a file says; nothing when it does not exist.
fn load(path: &Path) -> Result<Policy, String> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => Policy::parse(&name, &text).map_err(|error| error.to_string()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(Policy::default()),
        Err(e) => Err(format!("{name} cannot be read: {e}")),
    }
}

impl Rules {
    /// Reads everything. `user` is what the user of the virtual machine asks for.
    pub fn read(places: Places, user: Policy) -> Rules {
        let mut rules = Rules {
            places,
            owner: Policy::default(),
            admin: Policy::default(),
            user,
            words: Vec::new(),
            wrong: BTreeMap::new(),
            merged: Merged::default(),
            blocked: Vec::new(),
        };
        rules.read_admin();
        rules.read_owner();
        rules.read_words();
        rules
    }

    /// Reads the owner's file again. Answers what is wrong with it.
    pub fn read_owner(&mut self) -> Option<String> {
        let path = &self.places.owner;
        let own = |policy: Policy| match policy.owners {
            Some(_) => {
                let reason = "owners: only the administrator's file may say whose word counts".to_string();
                Err(PolicyError { file: path.display().to_string(), line: 1, reason }.to_string())
            }
            None => Ok(policy),
        };
        let read = load(path).and_then(own);
        self.take("owner", read, |rules, policy| rules.owner = policy)
    }

    /// Reads the administrator's file again. Answers what is wrong with it.
    pub fn read_admin(&mut self) -> Option<String> {
        let read = load(&self.places.admin);
        self.take("admin", read, |rules, policy| rules.admin = policy)
    }

    fn take(
        &mut self,
        which: &'static str,
        read: Result<Policy, String>,
        put: fn(&mut Rules, Policy),
    ) -> Option<String> {
        let wrong = match read {
            Ok(policy) => {
                put(self, policy);
                self.wrong.remove(which);
                None
            }
            Err(sentence) => {
                let sentence = format!("{sentence}; what was said before stays");
                self.wrong.insert(which, vec![sentence.clone()]);
                Some(sentence)
            }
        };
        self.merge();
        wrong
    }

    /// Reads the owners' words again. Answers what is wrong with them.
    pub fn read_words(&mut self) -> Vec<String> {
        let (words, wrong) = word::read_all(&self.places.words);
        self.words = words.into_iter().map(|(uid, word)| Spoken { uid, user: user_name(uid), word }).collect();
        self.wrong.insert("words", wrong.clone());
        self.merge();
        wrong
    }

    fn merge(&mut self) {
        let owners = self.admin.owners.as_deref();
        let counts = |spoken: &&Spoken| spoken.uid == 0 || owners.is_none_or(|owners| owners.contains(&spoken.user));
        let words: Vec<&Spoken> = self.words.iter().filter(counts).collect();
        // Several owners: what any of them does not want is not done.
        let never: Vec<_> = words.iter().filter_map(|s| s.word.policy.never.clone()).flatten().collect();
        let spoken = Policy {
            never: (!never.is_empty()).then_some(never),
            cores: words.iter().filter_map(|s| s.word.policy.cores).min(),
            ..Policy::default()
        };
        self.merged = Merged::of([
            ("pvm owner".to_string(), &spoken),
            (self.places.owner.display().to_string(), &self.owner),
            (self.places.admin.display().to_string(), &self.admin),
            ("the user of the virtual machine".to_string(), &self.user),
        ]);
        let names = self.merged.policy.blocked.clone().and_then(|b| b.users).unwrap_or_default();
        self.blocked = names.iter().filter_map(|name| uid_of(name)).collect();
    }

    /// The policy, and where each part of it comes from.
    pub fn merged(&self) -> &Merged {
        &self.merged
    }

    /// Numbers of the users that it blocks; names that nobody has here are left out.
    pub fn blocked(&self) -> &[u32] {
        &self.blocked
    }

    /// The owners' words.
    pub fn words(&self) -> &[Spoken] {
        &self.words
    }

    /// Users whose word counts, if the administrator has named them.
    pub fn owners(&self) -> Option<&[String]> {
        self.admin.owners.as_deref()
    }

    /// What was refused, one sentence for each.
    pub fn wrong(&self) -> Vec<String> {
        self.wrong.values().flatten().cloned().collect()
    }

    /// True when what guests may do depends on the clock.
    pub fn has_hours(&self) -> bool {
        self.merged.policy.never.is_some() || self.merged.policy.only.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::word::Word;
    use std::fs;

    fn rules(dir: &Path, user: &str) -> Rules {
        let places = Places { owner: dir.join("owner"), admin: dir.join("admin"), words: dir.to_path_buf() };
        Rules::read(places, Policy::parse("user", user).expect("good"))
    }

    #[test]
    fn the_owner_wins_over_the_administrator_and_he_over_the_user_and_a_word_over_all() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("admin"), "cores = 3\nnice = 5\n").expect("the test's own file");
        let mut rules = rules(dir.path(), "cores = 4\nnice = 9\nleave_after = 7");
        let cores = |rules: &Rules| rules.merged().policy.cores;
        assert_eq!((cores(&rules), rules.merged().policy.nice), (Some(3), Some(5)));
        fs::write(dir.path().join("owner"), "cores = 2\n").expect("the test's own file");
        assert_eq!(rules.read_owner(), None);
        assert_eq!(cores(&rules), Some(2));
        let word = Word { policy: Policy { cores: Some(1), ..Policy::default() }, ..Word::default() };
        word::write(dir.path(), Uid::effective().as_raw(), &word).expect("written");
        assert_eq!(rules.read_words(), Vec::<String>::new());
        assert_eq!(cores(&rules), Some(1));
        let said: Vec<_> = rules.merged().settings.iter().map(|(name, value, _)| format!("{name}={value}")).collect();
        assert_eq!(said, ["cores=1", "nice=5", "leave_after=7"]);
    }

    #[test]
    fn a_wrong_file_is_refused_and_what_was_said_before_stays_until_it_is_right_again() {
        let dir = tempfile::tempdir().expect("a folder");
        let put = |text: &str| fs::write(dir.path().join("owner"), text).expect("the test's own file");
        put("cores = 2\n");
        let mut rules = rules(dir.path(), "");
        put("cores = 3\nnever = 5\n");
        let wrong = rules.read_owner().expect("wrong");
        assert!(wrong.contains("owner:2: ") && wrong.ends_with("what was said before stays"), "{wrong}");
        assert_eq!((rules.merged().policy.cores, rules.wrong()), (Some(2), vec![wrong]));
        put("cores = 4\n");
        assert_eq!(rules.read_owner(), None);
        assert_eq!((rules.merged().policy.cores, rules.wrong().len()), (Some(4), 0));
        put("owners = [\"me\"]\n");
        assert!(rules.read_owner().expect("not his to say").contains("administrator"));
        fs::remove_file(dir.path().join("owner")).expect("the test's own file");
        assert_eq!(rules.read_owner(), None);
        assert_eq!(rules.merged().policy.cores, None);
    }

    #[test]
    fn blocked_users_are_known_by_name_or_number() {
        let dir = tempfile::tempdir().expect("a folder");
        let rules = rules(dir.path(), "[blocked]\nusers = [\"root\", \"12345\", \"nobody-has-this-name\"]");
        assert_eq!(rules.blocked(), [0, 12345]);
    }

    #[test]
    fn where_the_administrator_names_owners_other_words_do_not_count() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("admin"), "owners = [\"olga\"]\n").expect("the test's own file");
        let mut rules = rules(dir.path(), "");
        let uid = Uid::effective().as_raw();
        let spoken = |user: &str, uid| Spoken {
            uid,
            user: user.into(),
            word: Word { policy: Policy { cores: Some(1), ..Policy::default() }, ..Word::default() },
        };
        rules.words = vec![spoken("mallory", uid + 1)];
        rules.merge();
        assert_eq!(rules.merged().policy.cores, None);
        rules.words = vec![spoken("olga", uid + 1)];
        rules.merge();
        assert_eq!(rules.merged().policy.cores, Some(1));
    }
}
