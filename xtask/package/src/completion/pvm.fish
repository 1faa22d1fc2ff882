# Completion of Sempa's console for fish. Made from the console's table of commands.

# The words of the command line that the console would read, without its own options.
function __pvm_line
    commandline --current-process --cut-at-cursor | string replace --regex '^\s*\S+\s*((--json|-d\S*|-n\S*)\s+)*' ''
end

function __pvm_needs_command
    not string match --quiet --regex '\s' -- (__pvm_line)
end

function __pvm_words
    pvm --complete (__pvm_line) 2>/dev/null
end

complete -c pvm -f
complete -c pvm -n __pvm_needs_command -l json -d 'Print JSON'
complete -c pvm -n __pvm_needs_command -l help -d 'Explain the program'
complete -c pvm -n __pvm_needs_command -l version -d 'Print the version'
complete -c pvm -n 'not __pvm_needs_command' -f -a '(__pvm_words)'
@COMMANDS@
