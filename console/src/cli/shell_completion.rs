//! Completes a word for a shell: `pvm --complete LINE` prints the candidates for the last word of
//! LINE, one per line. The completion files of shells call it.

use super::completion::{NameSource, complete};
use crate::daemon::running::refuse_root;
use crate::session::CompletionNames;
use libpvm::Vm;
use sempa_proto::Tid;
use std::cell::OnceCell;
use std::io::{self, Write};
use std::path::Path;

/// Prints the candidates for the last word of `line`.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(super) fn print_candidates(line: &str) -> io::Result<()> {
    let names = ShellNames {
        vm: OnceCell::new(),
        session_names: CompletionNames {
            aliases: Vec::new(),
            variables: std::env::vars_os()
                .filter_map(|(name, _)| name.into_string().ok())
                .collect(),
        },
    };
    let (_, candidates) = complete(line, &names);
    let mut output = io::stdout().lock();
    for candidate in candidates {
        writeln!(output, "{}", candidate.trim_end())?;
    }
    Ok(())
}

/// Names for a shell. The program joins the virtual machine only for names of hosts and tasks, and
/// never starts one.
struct ShellNames {
    /// The virtual machine; `None` if none runs.
    vm: OnceCell<Option<Vm>>,
    session_names: CompletionNames,
}

impl ShellNames {
    fn vm(&self) -> Option<&Vm> {
        self.vm
            .get_or_init(|| refuse_root().ok().and_then(|()| Vm::enroll().ok()))
            .as_ref()
    }
}

impl NameSource for ShellNames {
    fn session_names(&self) -> &CompletionNames {
        &self.session_names
    }

    fn hosts(&self) -> Vec<String> {
        self.vm().map(host_names).unwrap_or_default()
    }

    fn tids(&self) -> Vec<String> {
        self.vm().map(task_tids).unwrap_or_default()
    }

    fn folder_entries(&self, dir: &Path) -> Vec<(String, bool)> {
        folder_entries(dir)
    }
}

/// Returns the names of all hosts.
pub(super) fn host_names(vm: &Vm) -> Vec<String> {
    vm.config()
        .map(|table| table.hosts.into_iter().map(|host| host.name).collect())
        .unwrap_or_default()
}

/// Returns the tids of all tasks except the calling one.
pub(super) fn task_tids(vm: &Vm) -> Vec<String> {
    let tasks = vm.tasks(Tid::NONE).unwrap_or_default();
    tasks
        .into_iter()
        .filter(|task| task.tid != vm.tid())
        .map(|task| task.tid.to_string())
        .collect()
}

/// Returns the entries of a folder, and true for each entry that is a folder.
pub(super) fn folder_entries(dir: &Path) -> Vec<(String, bool)> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let named_entries = entries.flatten().filter_map(|entry| {
        let is_dir = entry.path().is_dir();
        entry
            .file_name()
            .into_string()
            .ok()
            .map(|name| (name, is_dir))
    });
    named_entries.collect()
}
