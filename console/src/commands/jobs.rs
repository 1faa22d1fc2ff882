//! `jobs`: lists the jobs whose output or records this console collects.

use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::tables;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::Tid;
use serde_json::json;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "jobs",
    summary: "List jobs whose output is collected here",
    detail: "Syntax:  jobs [ -l ]\nOptions:  -l   with a line for each task\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct JobsCommand {
    /// True to print a line for each task.
    is_long: bool,
}

fn parse(args: &[String]) -> Result<JobsCommand, ParseError> {
    match args {
        [] => Ok(JobsCommand { is_long: false }),
        [flag] if flag == "-l" => Ok(JobsCommand { is_long: true }),
        [flag] if flag.starts_with('-') => Err(ParseError::UnknownFlag(flag[1..].to_string())),
        _ => Err(ParseError::WrongArgs("jobs")),
    }
}

impl VmCommand for JobsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let is_long = self.is_long;
        let mut text = if is_long {
            tables::ps_header(false)
        } else {
            String::new()
        };
        let (table, tasks) = if is_long {
            (session.vm.hosts()?, session.vm.tasks(Tid::NONE)?)
        } else {
            Default::default()
        };
        let mut values = Vec::new();
        for (job_number, tids) in session.jobs.running_jobs() {
            let is_traced = session
                .job_outputs
                .get(&job_number)
                .is_some_and(|job| job.is_traced());
            let mark = if is_traced { 'T' } else { ' ' };
            let tid_texts: Vec<String> = tids.iter().map(Tid::to_string).collect();
            if is_long {
                text.push_str(&format!("{mark}{job_number}:\n"));
                let rows = tasks.iter().filter(|task| tids.contains(&task.tid));
                rows.for_each(|task| {
                    text.push_str(&tables::ps_row(&table, task, session.vm.tid(), false))
                });
            } else {
                let tid_list: String = tids.iter().map(|tid| format!(" {tid}")).collect();
                text.push_str(&format!("{mark}{job_number}:{tid_list}\n"));
            }
            values.push(json!({ "number": job_number, "traced": is_traced, "tids": tid_texts }));
        }
        Ok(Outcome::with_json(text, json!({ "jobs": values }), false))
    }
}
