//! The operating system as the machines of the simulation see it.

use crate::World;
use sempa_proto::migration::Usage;
use sempa_proto::table::HostUsage;
use sempa_proto::{Micros, MigrationId, PvmError};
use std::path::PathBuf;

#[derive(Debug)]
pub(super) struct FakeWorld {
    pub(super) secret: i32,
    pub(super) unix_time: Micros,
    /// Name of a program that cannot be found. A program whose name contains `missing` can never be
    /// found.
    pub(super) missing_program: Option<&'static str>,
}

impl World for FakeWorld {
    fn find_program(&self, name: &str, _dir: Option<&str>) -> Result<PathBuf, PvmError> {
        if name.contains("missing") || self.missing_program == Some(name) {
            Err(PvmError::NoFile)
        } else {
            Ok(PathBuf::from(format!("/bin/{name}")))
        }
    }
    fn work_dir(&self, dir: Option<&str>) -> PathBuf {
        PathBuf::from(dir.unwrap_or("/home"))
    }
    fn base_environment(&self) -> Vec<Vec<u8>> {
        vec![b"HOME=/home".to_vec(), b"PVMEPID=7".to_vec()]
    }
    fn unix_time(&self) -> Micros {
        self.unix_time
    }
    fn host_usage(&self) -> Option<HostUsage> {
        Some(HostUsage {
            load_hundredths: 150,
            processor_count: 2,
            available_bytes: 1 << 30,
            total_bytes: 4 << 30,
        })
    }
    fn process_usage(&self, pid: i32) -> Usage {
        Usage {
            user: Micros(pid as u64),
            ..Usage::default()
        }
    }
    fn sent_bytes(&self, _migration: MigrationId) -> u64 {
        0
    }
    fn random_secret(&mut self) -> i32 {
        self.secret += 1;
        self.secret
    }
}
