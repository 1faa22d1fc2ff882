//! The taskers that the service has started, also before its last restart.
//!
//! Each running tasker has a file in a directory of root: its name is the PID, its content the user
//! id and the time at which the process has started. The time distinguishes the tasker from a later
//! process with the same PID.

use checkpoint::proc;
use sempa_proto::tasker_service::{ServiceRefusal, SessionId, SessionRecord};
use sempa_service_settings::host_account::is_running_since;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Maximum number of taskers on a host, and of one user.
const SESSIONS_MAX: usize = 1024;
const SESSIONS_OF_USER_MAX: usize = 16;

#[derive(Debug)]
pub(crate) struct SessionRegistry {
    dir: PathBuf,
    sessions: BTreeMap<SessionId, SessionRecord>,
}

impl SessionRegistry {
    /// Reads the records in `dir`, and removes those of taskers that have ended. Creates the
    /// directory if there is none.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        let mut registry = Self {
            dir: dir.to_path_buf(),
            sessions: BTreeMap::new(),
        };
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let id = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            let session = fs::read_to_string(entry.path())
                .ok()
                .and_then(|text| text.parse().ok());
            if let (Some(id), Some(session)) = (id.map(SessionId), session) {
                registry.sessions.insert(id, session);
            }
        }
        registry.remove_ended();
        Ok(registry)
    }

    /// Checks that a user may have another tasker.
    ///
    /// # Errors
    /// The user, or the host, has too many.
    pub(crate) fn check_limits(&mut self, uid: u32) -> Result<(), ServiceRefusal> {
        let of_user = |sessions: &BTreeMap<SessionId, SessionRecord>| {
            sessions
                .values()
                .filter(|session| session.uid == uid)
                .count()
        };
        let is_full = |registry: &Self| {
            registry.sessions.len() >= SESSIONS_MAX
                || of_user(&registry.sessions) >= SESSIONS_OF_USER_MAX
        };
        if is_full(self) {
            self.remove_ended();
        }
        match is_full(self) {
            false => Ok(()),
            true if of_user(&self.sessions) >= SESSIONS_OF_USER_MAX => {
                Err(ServiceRefusal::TooManyOfUser(SESSIONS_OF_USER_MAX))
            }
            true => Err(ServiceRefusal::TooMany(SESSIONS_MAX)),
        }
    }

    /// Records a tasker that has been started.
    ///
    /// # Errors
    /// The record cannot be written, or the tasker has ended.
    pub(crate) fn add(&mut self, id: SessionId, uid: u32) -> io::Result<()> {
        let stat = proc::stat(id.0).ok_or(io::ErrorKind::NotFound)?;
        let session = SessionRecord {
            uid,
            start_ticks: stat.starttime,
        };
        fs::write(self.path(id), session.to_string())?;
        self.sessions.insert(id, session);
        Ok(())
    }

    /// Returns true if the tasker runs and may be killed by the user `uid`.
    pub(crate) fn may_kill(&self, id: SessionId, uid: u32) -> bool {
        let session = self.sessions.get(&id);
        session.is_some_and(|session| {
            (uid == 0 || session.uid == uid) && is_running_since(id, session.start_ticks)
        })
    }

    /// Removes the record of a tasker that has ended.
    pub(crate) fn remove(&mut self, id: SessionId) {
        self.sessions.remove(&id);
        // The directory may have been removed; then nothing remains to be done.
        let _ = fs::remove_file(self.path(id));
    }

    fn remove_ended(&mut self) {
        let ended = |(id, session): &(&SessionId, &SessionRecord)| {
            !is_running_since(**id, session.start_ticks)
        };
        let ended: Vec<SessionId> = self
            .sessions
            .iter()
            .filter(ended)
            .map(|(id, _)| *id)
            .collect();
        ended.into_iter().for_each(|id| self.remove(id));
    }

    fn path(&self, id: SessionId) -> PathBuf {
        self.dir.join(id.0.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new service finds the taskers of the previous one that still run, and no others.
    #[test]
    fn running_sessions_are_found_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let own_id = SessionId(std::process::id().cast_signed());
        let mut registry = SessionRegistry::open(dir.path()).expect("a directory");
        registry.add(own_id, 1000).expect("this process runs");
        for (name, text) in [
            ("999999999", "1000 5\n"),
            ("1", "1000 5\n"),
            ("x", "1 1"),
            ("7", ""),
        ] {
            fs::write(dir.path().join(name), text).expect("the test's own directory");
        }
        let registry = SessionRegistry::open(dir.path()).expect("a directory");
        assert_eq!(
            registry.sessions.keys().copied().collect::<Vec<_>>(),
            [own_id]
        );
        assert!(registry.may_kill(own_id, 1000) && registry.may_kill(own_id, 0));
        assert!(!registry.may_kill(own_id, 1001) && !registry.may_kill(SessionId(1), 0));
    }

    /// Taskers of one user do not use up the limit of others.
    #[test]
    fn users_have_limits_of_their_own() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut registry = SessionRegistry::open(dir.path()).expect("a directory");
        let own_pid = std::process::id().cast_signed();
        let start_ticks = proc::stat(own_pid).expect("it runs").starttime;
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let child_id = SessionId(child.id().cast_signed());
        registry.add(child_id, 1).expect("it runs");
        // The other sessions are those of processes that have ended.
        for number in 0..SESSIONS_OF_USER_MAX {
            let id = SessionId(i32::MAX - number as i32);
            registry.sessions.insert(
                id,
                SessionRecord {
                    uid: 1,
                    start_ticks,
                },
            );
        }
        assert_eq!(registry.check_limits(1), Ok(()), "ended ones do not count");
        assert_eq!(registry.sessions.len(), 1);
        registry.sessions.extend((0..SESSIONS_OF_USER_MAX).map(|_| {
            (
                SessionId(own_pid),
                SessionRecord {
                    uid: 1,
                    start_ticks,
                },
            )
        }));
        assert_eq!(registry.check_limits(2), Ok(()));
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        registry.remove(child_id);
        assert!(!dir.path().join(child_id.0.to_string()).exists());
    }
}
