//! Prints the notes of this host about virtual machines that did not end in order, as text and as
//! JSON.
//! The daemons write the notes ([`sempa_notes`]).

use crate::output::terminal::Terminal;
use crate::output::time::format_local;
use sempa_notes::{NoteFolder, NoteState, ProcessIdentity, StoredNote};
use sempa_proto::Tid;
use sempa_proto::vm_summary::{SummaryCheckpoint, SummaryTask, VmSummary};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of jobs without a checkpoint, and of tasks of a job, that the text names.
const NAMES_SHOWN_MAX: usize = 10;

/// The notes of this machine, the newest first.
#[derive(Debug, Default)]
pub(crate) struct LostVms {
    folder: Option<NoteFolder>,
    notes: Vec<LostVm>,
}

/// A virtual machine that did not end in order.
#[derive(Clone, Debug)]
pub(crate) struct LostVm {
    stored: StoredNote,
    state: NoteState,
    /// For each checkpoint, true if it is in a store on this machine.
    are_here: Vec<bool>,
}

impl LostVm {
    fn new(stored: StoredNote) -> Self {
        let state = stored.note.state(&ProcessIdentity::of_this_process());
        let VmSummary {
            store, checkpoints, ..
        } = &stored.note.summary;
        let is_here = |checkpoint: &SummaryCheckpoint| {
            checkpoint.copy_hosts.contains(&stored.note.host)
                || (!store.is_empty() && Path::new(store).join(&checkpoint.name).is_dir())
        };
        Self {
            are_here: checkpoints.iter().map(is_here).collect(),
            stored,
            state,
        }
    }

    fn is_settled(&self) -> bool {
        self.stored.note.is_settled
    }
}

impl LostVms {
    /// Reads the notes of this machine. Without `with_settled`, those about which something is left
    /// to do.
    pub(crate) fn read(with_settled: bool) -> Self {
        let Some(folder) = NoteFolder::from_env(|name| std::env::var(name).ok()) else {
            return Self::default();
        };
        let notes = folder.lost_notes().into_iter().map(LostVm::new);
        Self {
            notes: notes
                .filter(|lost| with_settled || !lost.is_settled())
                .collect(),
            folder: Some(folder),
        }
    }

    /// Reads the notes about virtual machines in this runtime directory, if something is left to do
    /// about them.
    fn read_for(runtime_dir: &Path) -> Self {
        let mut lost_vms = Self::read(false);
        let is_addressed = |lost: &LostVm| lost.stored.note.runtime_dir == runtime_dir;
        lost_vms.notes.retain(is_addressed);
        lost_vms
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    pub(crate) fn text(&self) -> String {
        let texts: Vec<String> = self.notes.iter().map(note_text).collect();
        texts.concat()
    }

    pub(crate) fn json(&self) -> Vec<Value> {
        self.notes.iter().map(note_json).collect()
    }

    /// Removes all these notes. Returns the errors.
    pub(crate) fn dismiss(&self) -> Vec<String> {
        let results = self.notes.iter().map(|lost| lost.stored.remove());
        results
            .filter_map(|result| result.err().map(|error| error.to_string()))
            .collect()
    }

    /// Settles the notes of virtual machines without a checkpoint: nothing can be restarted.
    fn settle_without_checkpoints(&self) {
        let Some(folder) = &self.folder else { return };
        let notes = self.notes.iter().map(|lost| &lost.stored);
        for stored in notes.filter(|stored| stored.note.summary.checkpoints.is_empty()) {
            // The note is shown again at the next start.
            let _ = stored.settle(folder);
        }
    }
}

/// Shows the notes about earlier virtual machines in the runtime directory of one that this process
/// has just started. Those that offer a checkpoint are shown at each start, until the jobs are
/// restarted or the notes are dismissed.
pub(crate) fn show_at_start(runtime_dir: &Path) {
    let lost_vms = LostVms::read_for(runtime_dir);
    if lost_vms.is_empty() {
        return;
    }
    Terminal.print_error(&format!(
        "{}'pvm lost --all' shows this again; 'pvm lost --all --dismiss' removes it",
        lost_vms.text()
    ));
    lost_vms.settle_without_checkpoints();
}

/// Returns a line for a command that has found no virtual machine, if this host knows of one that
/// was lost.
pub(crate) fn hint_line(runtime_dir: &Path) -> Option<String> {
    let lost_vms = LostVms::read_for(runtime_dir);
    let lost = lost_vms.notes.first()?;
    Some(format!(
        "pvm: the last one did not end in order ({}): 'pvm lost' shows what ran, and how to restart it",
        loss_clause(lost)
    ))
}

/// Returns what was lost, and when.
fn loss_clause(lost: &LostVm) -> String {
    let note = &lost.stored.note;
    match (&note.master_loss, note.is_master) {
        (Some(loss), _) => format!(
            "this host, {}, lost the master {} at {}",
            note.host,
            note.summary.master_name(),
            format_local(loss.at)
        ),
        (None, is_master) => format!(
            "the daemon of this host, {}{}, ended without a halt after {}",
            note.host,
            if is_master { ", the master" } else { "" },
            format_local(lost.stored.touched_at)
        ),
    }
}

/// Returns what the loss means for the virtual machine.
fn consequence(lost: &LostVm) -> String {
    let note = &lost.stored.note;
    let master = note.summary.master_name();
    match (lost.state, note.is_master) {
        (NoteState::MasterLost, _) => format!(
            "The tasks of this host were ended. If {master} is not down but only cut off, the virtual machine goes on \
             there: look on {master} with 'pvm conf' before you restart a job"
        ),
        (_, true) if note.summary.host_count <= 1 => {
            "It was killed, or the machine went down. Its tasks have ended".into()
        }
        (_, true) => {
            "It was killed, or the machine went down. The other hosts have lost their master and have ended all tasks"
                .into()
        }
        (_, false) => format!(
            "It was killed, or the machine went down. The virtual machine goes on without this host if its master, \
             {master}, lives: look on {master} with 'pvm conf'"
        ),
    }
}

/// Replaces control characters, which could change what a terminal shows.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// Joins the first names, and counts the others. `count` is the number of all of them.
fn join_names(names: &[String], count: u32) -> String {
    let shown = &names[..names.len().min(NAMES_SHOWN_MAX)];
    match (count as usize).saturating_sub(shown.len()) {
        0 => shown.join(", "),
        others => format!("{} and {others} more", shown.join(", ")),
    }
}

/// Groups tasks by their jobs.
fn tasks_by_job(tasks: &[SummaryTask]) -> BTreeMap<Tid, Vec<&SummaryTask>> {
    let mut jobs = BTreeMap::<Tid, Vec<&SummaryTask>>::new();
    for task in tasks {
        jobs.entry(task.job).or_default().push(task);
    }
    jobs
}

fn note_text(lost: &LostVm) -> String {
    let note = &lost.stored.note;
    let summary = &note.summary;
    let host_names: Vec<String> = summary.hosts.iter().map(|host| host.name.clone()).collect();
    let mut text = format!(
        "The virtual machine {} (master {}; hosts {}) did not end in order:\n  {}",
        note.vm,
        summary.master_name(),
        join_names(&host_names, summary.host_count),
        loss_clause(lost)
    );
    if let Some(loss) = &note.master_loss {
        text.push_str(&format!(": {}", printable(&loss.why)));
    }
    text.push_str(&format!(".\n  {}.\n", consequence(lost)));
    text.push_str(&tasks_text(summary));
    for (checkpoint, is_here) in summary.checkpoints.iter().zip(&lost.are_here) {
        text.push_str(&checkpoint_text(summary, checkpoint, *is_here));
    }
    text.push_str(&jobs_without_checkpoint_text(summary));
    text
}

fn tasks_text(summary: &VmSummary) -> String {
    let at = format_local(summary.made_at);
    if summary.task_count == 0 {
        return format!("  No task ran at {at}.\n");
    }
    let ending = if summary.task_count == 1 { "" } else { "s" };
    let mut text = format!(
        "  What ran, as of {at} ({} task{ending}):\n",
        summary.task_count
    );
    let jobs = tasks_by_job(&summary.tasks);
    for (job, tasks) in jobs.iter().take(NAMES_SHOWN_MAX) {
        let names: Vec<String> = tasks
            .iter()
            .map(|task| format!("{} {} on {}", task.tid, printable(&task.program), task.host))
            .collect();
        let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
        text.push_str(&format!("    job {job}: {}\n", join_names(&names, count)));
    }
    let shown_count: usize = jobs
        .values()
        .take(NAMES_SHOWN_MAX)
        .map(|tasks| tasks.len())
        .sum();
    match (summary.task_count as usize).saturating_sub(shown_count) {
        0 => {}
        others => text.push_str(&format!("    and {others} more tasks\n")),
    }
    text
}

/// Returns the checkpoint, where it is, and the commands that restart it.
fn checkpoint_text(summary: &VmSummary, checkpoint: &SummaryCheckpoint, is_here: bool) -> String {
    let made = checkpoint
        .made_at
        .map(|at| format!(", complete at {}", format_local(at)))
        .unwrap_or_default();
    let copies = match &checkpoint.copy_hosts[..] {
        [] => String::new(),
        hosts => format!(", with copies on {}", hosts.join(", ")),
    };
    let place = match is_here {
        true => "here".into(),
        false => {
            let mut hosts = vec![summary.master_name().to_string()];
            hosts.extend(checkpoint.copy_hosts.iter().cloned());
            format!("on {}", hosts.join(" or "))
        }
    };
    format!(
        "  Newest checkpoint of job {} {}: {}{made}, in {} on {}{copies}.\n    Restart it {place}: pvm start; {}\n",
        checkpoint.job,
        printable(&checkpoint.program),
        checkpoint.name,
        summary.store,
        summary.master_name(),
        restart_command(checkpoint)
    )
}

fn restart_command(checkpoint: &SummaryCheckpoint) -> String {
    format!("pvm restart {}", checkpoint.name)
}

fn jobs_without_checkpoint_text(summary: &VmSummary) -> String {
    let has_checkpoint = |job: Tid| summary.checkpoints.iter().any(|entry| entry.job == job);
    let names: Vec<String> = tasks_by_job(&summary.tasks)
        .iter()
        .filter(|(job, _)| !has_checkpoint(**job))
        .map(|(job, tasks)| {
            let first_task = tasks.iter().find(|task| task.tid == *job);
            format!(
                "{job} {}",
                first_task.map_or(String::new(), |task| printable(&task.program))
            )
        })
        .collect();
    match u32::try_from(names.len()).unwrap_or(u32::MAX) {
        0 => String::new(),
        count => format!(
            "  Without a checkpoint, so what they computed is lost: jobs {}. Start them again with 'pvm spawn'.\n",
            join_names(&names, count)
        ),
    }
}

fn note_json(lost: &LostVm) -> Value {
    let note = &lost.stored.note;
    let summary = &note.summary;
    let hosts: Vec<&str> = summary.hosts.iter().map(|host| &*host.name).collect();
    let tasks: Vec<Value> = summary
        .tasks
        .iter()
        .map(|task| {
            json!({
                "tid": task.tid.to_string(), "job": task.job.to_string(), "program": task.program,
                "host": task.host,
            })
        })
        .collect();
    let checkpoints: Vec<Value> = summary
        .checkpoints
        .iter()
        .zip(&lost.are_here)
        .map(|(checkpoint, is_here)| {
            json!({
                "set": checkpoint.name, "job": checkpoint.job.to_string(),
                "program": checkpoint.program, "made_us": checkpoint.made_at.map(|at| at.0),
                "copies": checkpoint.copy_hosts, "here": is_here,
                "restart": restart_command(checkpoint),
            })
        })
        .collect();
    json!({
        "vm": note.vm,
        "host": note.host,
        "master": summary.master_name(),
        "is_master": note.is_master,
        "hosts": hosts,
        "host_count": summary.host_count,
        "state": match lost.state {
            NoteState::MasterLost => "master lost",
            NoteState::DaemonEnded | NoteState::Running => "daemon ended",
        },
        "lost_us": note.master_loss.as_ref().map(|loss| loss.at.0),
        "why": note.master_loss.as_ref().map(|loss| &loss.why),
        "alive_us": lost.stored.touched_at.0,
        "summary_us": summary.made_at.0,
        "tasks": tasks,
        "task_count": summary.task_count,
        "store": summary.store,
        "sets": checkpoints,
        "settled": note.is_settled,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_notes::VmNote;
    use sempa_proto::vm_summary::SummaryHost;
    use sempa_proto::{HostId, Micros};

    const JOB: Tid = Tid::from_raw(0x40002);

    fn task(tid: i32, job: Tid, program: &str, host: &str) -> SummaryTask {
        SummaryTask {
            tid: Tid::from_raw(tid),
            job,
            program: program.into(),
            host: host.into(),
        }
    }

    fn summary() -> VmSummary {
        let host = |index: u16| SummaryHost {
            id: HostId::new(index).expect("an index"),
            name: format!("h{index}"),
            addresses: Vec::new(),
        };
        VmSummary {
            created_at: Micros(1),
            made_at: Micros(2_000_000),
            hosts: vec![host(1), host(2)],
            host_count: 2,
            tasks: vec![
                task(0x40002, JOB, "main", "h1"),
                task(0x80001, JOB, "worker", "h2"),
                task(0x40007, Tid::from_raw(0x40007), "sweep\u{1b}[2J", "h1"),
            ],
            task_count: 3,
            checkpoints: vec![SummaryCheckpoint {
                job: JOB,
                program: "main".into(),
                name: "t40002-20261121T104003-1".into(),
                made_at: Some(Micros(1_000_000)),
                copy_hosts: Vec::new(),
            }],
            checkpoint_count: 1,
            store: "/nowhere/store".into(),
        }
    }

    /// Returns a virtual machine that was lost, as the host `host` knows it.
    fn lost_vm(host: &str, master_loss: Option<&str>, summary: VmSummary) -> LostVm {
        let is_master = host == "h1";
        let mut note = VmNote::new("pvm", Path::new("/tmp/x/pvm"), host, is_master, &[]);
        note.summary = summary;
        if let Some(why) = master_loss {
            note.record_master_loss(Micros(3_000_000), why);
        }
        // No process has this start time.
        note.daemon.start_ticks += 1;
        let dir = tempfile::tempdir().expect("a directory");
        let home = dir.path().display().to_string();
        let folder = NoteFolder::from_env(|name| (name == "HOME").then(|| home.clone()));
        let folder = folder.expect("a place");
        folder.write(&note).expect("written");
        LostVm::new(folder.lost_notes().pop().expect("a note"))
    }

    /// The text says what is lost, when and why, what ran, and how to restart it.
    #[test]
    fn text_of_lost_master_says_what_to_do() {
        let text = note_text(&lost_vm("h2", Some("it was silent"), summary()));
        let time = |second: u64| format_local(Micros::from_secs(second));
        let (lost_at, summary_at, made_at) = (time(3), time(2), time(1));
        assert_eq!(
            text,
            format!(
                "The virtual machine pvm (master h1; hosts h1, h2) did not end in order:\n  \
             this host, h2, lost the master h1 at {lost_at}: it was silent.\n  \
             The tasks of this host were ended. If h1 is not down but only cut off, the virtual machine goes on there: \
             look on h1 with 'pvm conf' before you restart a job.\n  \
             What ran, as of {summary_at} (3 tasks):\n    \
             job t40002: t40002 main on h1, t80001 worker on h2\n    \
             job t40007: t40007 sweep?[2J on h1\n  \
             Newest checkpoint of job t40002 main: t40002-20261121T104003-1, complete at {made_at}, in \
             /nowhere/store on h1.\n    \
             Restart it on h1: pvm start; pvm restart t40002-20261121T104003-1\n  \
             Without a checkpoint, so what they computed is lost: jobs t40007 sweep?[2J. Start them again with 'pvm spawn'.\n"
            )
        );
    }

    /// The host of a killed daemon cannot know the time of the loss, only when its daemon lived.
    #[test]
    fn text_of_ended_daemon_depends_on_its_role() {
        let text = note_text(&lost_vm("h1", None, summary()));
        assert!(
            text.contains("the daemon of this host, h1, the master, ended without a halt after 20")
                && text.contains("The other hosts have lost their master"),
            "{text}"
        );
        let text = note_text(&lost_vm("h2", None, summary()));
        assert!(
            text.contains("the daemon of this host, h2, ended without a halt after 20")
                && text.contains("goes on without this host if its master, h1, lives"),
            "{text}"
        );
    }

    /// A checkpoint with a copy on this host, or in a directory that this host can read, is
    /// restarted here.
    #[test]
    fn restart_is_offered_where_the_checkpoint_is() {
        let mut copied = summary();
        copied.checkpoints[0].copy_hosts = vec!["h2".into()];
        let text = note_text(&lost_vm("h2", Some("x"), copied.clone()));
        assert!(
            text.contains(
                ", with copies on h2.\n    Restart it here: pvm start; pvm restart t40002-"
            ),
            "{text}"
        );
        copied.checkpoints[0].copy_hosts = vec!["h3".into()];
        let text = note_text(&lost_vm("h2", Some("x"), copied));
        assert!(
            text.contains("Restart it on h1 or h3: pvm start;"),
            "{text}"
        );
        let store = tempfile::tempdir().expect("a directory");
        let mut shared = summary();
        shared.store = store.path().display().to_string();
        std::fs::create_dir(store.path().join(&shared.checkpoints[0].name)).expect("made");
        let lost = lost_vm("h2", Some("x"), shared);
        assert!(note_text(&lost).contains("Restart it here:"));
        assert_eq!(note_json(&lost)["sets"][0]["here"], true);
    }

    /// An idle virtual machine, and one with many tasks.
    #[test]
    fn text_counts_what_is_not_named() {
        let text = note_text(&lost_vm("h2", Some("x"), VmSummary::default()));
        assert!(
            text.contains("  No task ran at 1970") && !text.contains("checkpoint"),
            "{text}"
        );
        let mut large = summary();
        large.tasks = (1..=128)
            .map(|n| task(0x40100 + n, Tid::from_raw(0x40100 + n), "case", "h1"))
            .collect();
        large.task_count = 500;
        let text = note_text(&lost_vm("h2", Some("x"), large));
        assert!(text.contains("    and 490 more tasks\n"), "{text}");
        assert!(text.contains(" and 118 more. Start them again"), "{text}");
        assert!(text.lines().count() < 20, "{text}");
    }

    /// A virtual machine of one host has no others that could go on.
    #[test]
    fn text_of_single_host_names_no_others() {
        let mut single = summary();
        (single.host_count, single.task_count) = (1, 1);
        single.hosts.truncate(1);
        single.tasks.truncate(1);
        let text = note_text(&lost_vm("h1", None, single));
        assert!(
            text.contains("Its tasks have ended.\n") && text.contains("(1 task):"),
            "{text}"
        );
    }

    #[test]
    fn json_has_the_facts_of_the_text() {
        let value = note_json(&lost_vm("h2", Some("it was silent"), summary()));
        assert_eq!(value["state"], "master lost");
        assert_eq!(
            (&value["lost_us"], &value["why"]),
            (&json!(3_000_000), &json!("it was silent"))
        );
        assert_eq!(value["tasks"][1]["host"], "h2");
        assert_eq!(
            value["sets"][0]["restart"],
            "pvm restart t40002-20261121T104003-1"
        );
        let value = note_json(&lost_vm("h1", None, summary()));
        assert_eq!(
            (&value["state"], &value["lost_us"]),
            (&json!("daemon ended"), &Value::Null)
        );
    }
}
