"""detrun on another machine: a connection, and one small protocol that both of its ends speak.

    near (a laptop)                                     far (a login node)
    client.py      one connection, of either kind
    paramiko_client.py   openssh_client.py              sshd
    wire.py        messages over its byte streams  ◄──► far.py       one verb a call: receive, start, follow, end, bring
    tree.py        what is uploaded                     far_store.py where it lies, by its content
                                                        far_runs.py  commands that run detached, each in
                                                                     the hands of detached.py
                                                        far_files.py what is brought back

The only thing that is ever run there is `detrun far VERB`; what is asked for follows as JSON.
"""
