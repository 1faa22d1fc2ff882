//! The help texts of all commands.

/// Help for one command.
pub(crate) struct CommandHelp {
    /// The name as typed.
    pub(crate) name: &'static str,
    /// One line for the list of commands.
    pub(crate) summary: &'static str,
    /// The lines below the summary: syntax, options and details.
    pub(crate) detail: &'static str,
}

/// Commands that the list omits, because they only inspect the daemon or the console.
const UNLISTED_COMMANDS: [&str; 2] = ["idump", "tickle"];

/// All commands, sorted by name.
pub(crate) const COMMANDS: &[CommandHelp] = &[
    CommandHelp {
        name: "add",
        summary: "Add hosts to the virtual machine",
        detail: "Syntax:  add host ...\n  or     add 'host option=value ...' ...\n\
                 Options: lo=user dx=daemon ep=path wd=dir sp=speed ip=address bx=debugger\n",
    },
    CommandHelp {
        name: "alias",
        summary: "Define a short name for a command, or list them",
        detail: "Syntax:  alias [ name command [ arg ... ] ]\n",
    },
    CommandHelp {
        name: "can-migrate",
        summary: "Tell which hosts would take a running task, and what the others have against it",
        detail: "Syntax:  can-migrate tid [ host ]\nAsks all hosts, or only this one; nothing is moved and nothing stands still.\n\
                 The hosts come in the order of their distance. The answer holds for now: a move asks again.\n\
                 Where it would not go by CRIU, the way is said: its own checkpoint, or restart (SEMPA_ENGINE).\n",
    },
    CommandHelp {
        name: "checkpoint",
        summary: "Write all tasks of a job to the store, as they are at one moment",
        detail: "Syntax:  checkpoint [ --every time | --loss time | --stop | --end ] tid\nThe job is this task and everything that it and its \
                 descendants have spawned. Its tasks stand still\nwhile they are written; all others go on. With --every (as \
                 30s, 5m) it is done again and again, and the\njob goes back to its newest checkpoint when a host is lost that \
                 had tasks of it. With --loss it is done so often that no more work than\nthat is lost then.\nWith --end the job ends when its checkpoint is complete; 'restart' starts it again.\nTasks that CRIU cannot write may write themselves (SEMPA_ENGINE=own, SEMPA_STATE).\nThe store is on the master's host: $SEMPA_STORE, or ~/.local/state/sempa/checkpoints.\n",
    },
    CommandHelp {
        name: "checkpoints",
        summary: "List the checkpoints in the store, or remove some",
        detail: "Syntax:  checkpoints [ --remove set ... | --remove-job tid ] [ --any ]\nOldest first. When the store is full those of \
                 jobs that came to a good end or were killed go first, then the\noldest ones, but never the newest of \
                 a job that may still be wanted.\n--remove removes these, and --remove-job all of a job, but for one that is being started, and \
                 one that a job\nwould go back to. With --any also those that other virtual machines of yours have made.\n",
    },
    CommandHelp {
        name: "conf",
        summary: "List the hosts of the virtual machine",
        detail: "Syntax:  conf\nOutput fields:\n  HOST    name of the host\n  DTID    its tid\n  ARCH    its architecture\n  \
                 SPEED   its relative speed, as given when it was added\n  DSIG    how its machine lays out numbers\n",
    },
    CommandHelp {
        name: "delete",
        summary: "Take hosts out of the virtual machine",
        detail: "Syntax:  delete host ...\nTasks that run there are ended.\n",
    },
    CommandHelp {
        name: "drain",
        summary: "Have all tasks leave a host, and keep others away",
        detail: "Syntax:  drain host [ --deadline time ] [ --checkpoint ]\nReturns when the host is empty, or at the deadline (as 30s, 5m), or when \
                 nothing has left for 10 s,\nwith what is still there and why; the order stands until 'undrain'.\n\
                 With a deadline the jobs that still have tasks there are checkpointed when the time that is left is\njust enough, and go on; \
                 with --checkpoint they are ended as well, and in the end those of all that are\nstill there, but for those whose first task \
                 was started by hand and is alive.\n\
                 Of tasks that leave together the smallest go first.\n\
                 Tasks that were started by hand, and what belongs to the host, stay.\nThe resource manager moves the tasks.\n",
    },
    CommandHelp {
        name: "echo",
        summary: "Print the arguments",
        detail: "Syntax:  echo [ word ... ]\n",
    },
    CommandHelp {
        name: "events",
        summary: "Show what happened in the virtual machine, and why",
        detail: "Syntax:  events [ --from number ] [ --follow ]\nOne line for each event: time (UTC), host, what happened.\n\
                 --follow goes on until it is interrupted (only as `pvm events --follow`).\n",
    },
    CommandHelp {
        name: "export",
        summary: "Add variables to the environment of tasks spawned from here",
        detail: "Syntax:  export [ variable ... ]\n",
    },
    CommandHelp {
        name: "getopt",
        summary: "Show options of the console's own task",
        detail: "Syntax:  getopt [ option ]\n",
    },
    CommandHelp {
        name: "halt",
        summary: "End the virtual machine: all tasks, all daemons",
        detail: "Syntax:  halt\nReturns when the daemon of this host is gone.\n",
    },
    CommandHelp {
        name: "help",
        summary: "Explain a command",
        detail: "Syntax:  help [ command ]\n",
    },
    CommandHelp {
        name: "id",
        summary: "Print the console's own tid",
        detail: "Syntax:  id\n",
    },
    CommandHelp {
        name: "idump",
        summary: "Show how much memory the console uses",
        detail: "Syntax:  idump [ how ]\n",
    },
    CommandHelp {
        name: "job",
        summary: "Show, end, suspend or resume whole jobs: a task from a command line and all that it spawned",
        detail: "Syntax:  job list [ --user user ]\n         job status tid\n         job kill tid\n         \
                 job suspend [ --task ] tid\n         job resume [ --task ] tid\n\
                 A job is named by any of its tasks. 'list' shows spawns, too, that wait for a place, since when and why.\n\
                 'status' shows how each task ended and what it used; 'kill' ends\n\
                 all of them, after ten seconds by SIGKILL, or takes a job out of the queue that waits in the store for room.\n\
                 Tasks of a suspended job stand still, those included that it spawns meanwhile, and can still be moved.\n\
                 Tasks from a command line go on. With '--task' the one task alone is suspended or resumed.\n\
                 The resource manager knows the jobs.\n",
    },
    CommandHelp {
        name: "jobs",
        summary: "List jobs whose output is collected here",
        detail: "Syntax:  jobs [ -l ]\nOptions:  -l   with a line for each task\n",
    },
    CommandHelp {
        name: "kill",
        summary: "End tasks (SIGTERM)",
        detail: "Syntax:  kill [ -c ] tid ...\nOptions:  -c   the children of tid instead\n",
    },
    CommandHelp {
        name: "migrate",
        summary: "Move a running task to another host",
        detail: "Syntax:  migrate tid host\nReturns when the task runs there and all of its memory is there, or says which step\n\
                 failed and why; the task then goes on where it was.\n",
    },
    CommandHelp {
        name: "mstat",
        summary: "Tell whether hosts are up",
        detail: "Syntax:  mstat host ...\n",
    },
    CommandHelp {
        name: "names",
        summary: "List the mailbox of the virtual machine",
        detail: "Syntax:  names [ pattern ]\n",
    },
    CommandHelp {
        name: "owner",
        summary: "Say what guests may do on your machine, and see who uses it",
        detail: "Syntax:  owner [ status ]\n         owner away | here [ --for time ]\n         owner auto\n         \
                 owner never hours [ and hours ... ] | none\n         owner limit number [ cores ] | none\n         \
                 owner policy [ file | none ]\n\
                 Run it on your machine; it needs no virtual machine of yours.\n\
                 status  who uses this machine, since when, and why they may or may not\n\
                 away    you do not need it: guests are welcome although you are logged in\n\
                 here    you need it: guests stop and leave\n        \
                 both end with --for (as 30m, 2h, 1d), else with the next login or logout, or after 12 hours\n\
                 auto    judge by logins and other signs again\n\
                 never   no guests at these times, as 9-17, mon-fri 9-17:30, fri 22-6, sat,sun, always\n\
                 limit   so many of their tasks at most, on as many processors\n\
                 policy  all that a file says, as docs/owner.toml does, counts as your rules; alone it shows them\n\
                 A virtual machine of your own reads ~/.config/sempa/owner.toml besides.\n",
    },
    CommandHelp {
        name: "ps",
        summary: "List tasks",
        detail: "Syntax:  ps [ -a ] [ -l ] [ -x ] [ -htid ] [ -nhost ]\n\
                 Options:  -a       on all hosts (default: on this one)\n          \
                 -htid    on the host with this tid, or this one task\n          \
                 -nhost   on the host with this name\n          \
                 -l       with parent and process id\n          \
                 -x       with the console itself\n\
                 Output fields:\n  HOST    where it runs now\n  TID     task id\n  PTID    parent\n  \
                 PID     process id on its host\n  FLAG    state\n  COMMAND program, or - when started by hand\n\
                 FLAG values:\n  f   started by the virtual machine\n  c   connected to its daemon\n  \
                 a   waiting for authorization\n  o   connection is being closed\n  s   deadlocked\n  \
                 H   hoster\n  R   resource manager\n  T   tasker\n",
    },
    CommandHelp {
        name: "pstat",
        summary: "Tell whether tasks run",
        detail: "Syntax:  pstat tid ...\n",
    },
    CommandHelp {
        name: "put",
        summary: "Put an empty entry into the mailbox",
        detail: "Syntax:  put name flags\n",
    },
    CommandHelp {
        name: "quit",
        summary: "Leave the console; the virtual machine goes on",
        detail: "Syntax:  quit\n",
    },
    CommandHelp {
        name: "replay",
        summary: "Run what a resource manager has recorded under another policy, and compare",
        detail: "Syntax:  replay log --policy file\nThe log is one that 'pvm-rm --record log' has written.\n",
    },
    CommandHelp {
        name: "reset",
        summary: "End all tasks and clean the mailbox",
        detail: "Syntax:  reset\n\nreset info    only remove mailbox entries that nobody owns\n\
                 Syntax:  reset info [ class [ index ] ]\n",
    },
    CommandHelp {
        name: "restart",
        summary: "Start the tasks of a checkpoint again",
        detail: "Syntax:  restart set [ --on host[,host ...] ]\nThey keep their tids and go on where they were when the checkpoint \
                 was made, also in a new virtual machine.\nAll of them are started, or none.\n",
    },
    CommandHelp {
        name: "setenv",
        summary: "Show or set the console's environment variables",
        detail: "Syntax:  setenv [ name [ value ... ] ]\nA variable reaches spawned tasks when it is exported.\n",
    },
    CommandHelp {
        name: "setopt",
        summary: "Set options of the console's own task",
        detail: "Syntax:  setopt option value\n",
    },
    CommandHelp {
        name: "sig",
        summary: "Send a signal to tasks",
        detail: "Syntax:  sig signal tid ...\nThe signal is a number or a name such as TERM.\n",
    },
    CommandHelp {
        name: "spawn",
        summary: "Start tasks",
        detail: "Syntax:  spawn [ options ] file [ arg ... ]\n\
                 Options:  -(count)       number of tasks, 1 by default\n          \
                 -(host)        on this host; -. is the console's own\n          \
                 -(ARCH)        on hosts of this architecture\n          \
                 -(host):(wd)   there, in directory wd\n          \
                 -:(wd)         anywhere, in directory wd\n          \
                 --host=(name)  as -(host), for names that start with a digit\n          \
                 -~             anywhere but there\n          \
                 -?             under the debugger\n          \
                 ->             show the output here, as a job\n          \
                 ->(file)       write the output to a new file\n          \
                 ->>(file)      append the output to a file\n          \
                 -@             trace the job, show the records here\n          \
                 -@(file)       trace the job, write the records to a new file\n          \
                 --job (file)   a job file says what is not said here: program, arguments, count, wants ...\n",
    },
    CommandHelp {
        name: "start",
        summary: "Start the virtual machine in the background",
        detail: "Syntax:  pvm [ -dMASK ] [ -nNAME ] start [ hostfile ]\n",
    },
    CommandHelp {
        name: "tickle",
        summary: "Ask the daemon about itself",
        detail: "Syntax:  tickle how [ arg ... ]\nHow:\n  0        memory, into the log\n  1        host table, into the log\n  \
                 2        local tasks, into the log\n  3        what is waited for, into the log\n  \
                 4        mailbox, into the log\n  5        show the debug mask\n  6 mask   set the debug mask\n  \
                 7 num    accepted, without effect\n  8 dtid   give up the host with this tid\n  \
                 9        statistics, into the log\n",
    },
    CommandHelp {
        name: "trace",
        summary: "Choose the events that tasks spawned with -@ record",
        detail: "Syntax:  trace\n         trace [+] name ...\n         trace - name ...\n         trace [+] *\n         \
                 trace - *\n         trace xpvm (what XPVM displays, the default)\n         trace buf [ bytes ]\n         \
                 trace opt [ full | time | count ]\n",
    },
    CommandHelp {
        name: "unalias",
        summary: "Forget aliases",
        detail: "Syntax:  unalias name ...\n",
    },
    CommandHelp {
        name: "undrain",
        summary: "Let a host take tasks again",
        detail: "Syntax:  undrain host\n",
    },
    CommandHelp {
        name: "unexport",
        summary: "Take variables out of the environment of tasks spawned from here",
        detail: "Syntax:  unexport variable ...\n",
    },
    CommandHelp {
        name: "usage",
        summary: "Show what users or jobs have used",
        detail: "Syntax:  usage [ --user user ] [ --job tid ]\nOutput fields:\n  CPU S    processor time of tasks that have ended\n  \
                 WALL S   time from their begin to their end, all together\n  MOVED    moves\n  \
                 EVICTED  how often one had to go because of an owner: by a move, by its end, or with its checkpointed job\n  \
                 INDEX    who has taken less has a lower one, and is served first\n",
    },
    CommandHelp {
        name: "version",
        summary: "Show the version of the interface",
        detail: "Syntax:  version\n",
    },
    CommandHelp {
        name: "why",
        summary: "Tell why a task is where it is, or why a host is not used",
        detail: "Syntax:  why [ -a ] tid | host\nThe newest decisions of the resource manager about it, with their reasons; of the task \
                 at the top\nof a job about all of its tasks; and of a host what holds of it now.\nOptions:  -a   all of them\n",
    },
];

/// Returns the command with this name.
pub(crate) fn find(name: &str) -> Option<&'static CommandHelp> {
    COMMANDS.iter().find(|entry| entry.name == name)
}

/// Returns the text of `help NAME`, or `None` if there is no such command.
pub(crate) fn help_text(name: &str) -> Option<String> {
    let entry = find(name)?;
    let mut text = format!("{:<12}{}\n{}", entry.name, entry.summary, entry.detail);
    if name == "help" {
        text.push_str(&command_list());
    }
    Some(text)
}

/// Returns the list of all commands.
fn command_list() -> String {
    let mut text = String::from("Commands are:\n");
    for entry in COMMANDS
        .iter()
        .filter(|entry| !UNLISTED_COMMANDS.contains(&entry.name))
    {
        text.push_str(&format!("  {:<12}{}\n", entry.name, entry.summary));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The commands are sorted by name, and each has its syntax.
    #[test]
    fn commands_are_sorted_and_have_syntax() {
        assert!(COMMANDS.windows(2).all(|pair| pair[0].name < pair[1].name));
        for entry in COMMANDS {
            assert!(entry.detail.starts_with("Syntax:  "), "{}", entry.name);
            assert!(entry.detail.ends_with('\n'), "{}", entry.name);
        }
    }

    /// The help texts have the layout of PVM's.
    #[test]
    fn help_layout_matches_pvm() {
        let text = help_text("help").expect("a command");
        assert!(
            text.starts_with("help        Explain a command\nSyntax:  help [ command ]\nCommands are:\n  add         ")
        );
        assert!(
            help_text("id")
                .expect("a command")
                .starts_with("id          Print")
        );
        assert_eq!(help_text("foo"), None);
    }
}
